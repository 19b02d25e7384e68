#!/usr/bin/env python3
"""Speaks as much of llama-server's HTTP as the benchmark uses; answers with the context size and the number of slots."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = dict(zip(sys.argv[1:], sys.argv[2:]))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"status": "ok"} if self.path == "/health" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion" and body["cache_prompt"] and body["temperature"] == 0
        if 99 in body["prompt"]:
            return self.answer({"error": "no room"}, 500)
        tokens = [int(options["--ctx-size"]), int(options["--parallel"])] + [sum(body["prompt"])] * body["n_predict"]
        self.answer({"tokens": tokens[: body["n_predict"]], "timings": {"prompt_n": len(body["prompt"])}})

    def answer(self, body, status=200):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args): ...


ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
