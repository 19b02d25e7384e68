"""The figures at the end of a run: as lines for a person, and as summary.json beside the results."""

from __future__ import annotations

from typing import Any

from batchgen.report.roofline import roofline_line


def summary_lines(s: dict[str, Any]) -> list[str]:
    """`s` is what runner.summarize makes and summary.json holds."""
    rows, tokens = s["rows"], s["tokens"]
    status = ", ".join(f"{n} {name}" for name, n in rows["by_status"].items()) or "none"
    copies = f", {rows['repeated']} as copies of the answer to an equal prompt" if rows["repeated"] else ""
    lines = [f"rows      {rows['answers']} answers ({status}); {rows['answered_now']} of them in this run{copies}"]
    if rows["by_error_code"]:
        lines.append("errors    " + ", ".join(f"{code}: {n}" for code, n in rows["by_error_code"].items()))
    if tokens["prompt"]:
        lines += [
            f"tokens    {tokens['prompt']:,} prompt, of them {tokens['computed']:,} computed and "
            f"{tokens['cached']:,} shared; {tokens['output']:,} generated"
            + (f" on top of {tokens['resumed']:,} of the run before" if tokens["resumed"] else ""),
            f"prefix    {tokens['saved_predicted']:.1%} of prompt tokens saved as planned, "
            f"{tokens['saved_achieved']:.1%} achieved; "
            f"key/value reads {1 - tokens['kv_read'] / max(tokens['kv_visible'], 1):.1%} fewer than unshared",
            f"engine    {s['steps']} steps, up to {s['max_running']} requests at once, {s['preemptions']} preemptions"
            + (f" ({tokens['recomputed']:,} tokens computed again)" if tokens["recomputed"] else "")
            + (f"; {s['out_of_memory']} steps ran out of memory" if s["out_of_memory"] else "")
            + (f"; {s['failed_steps']} steps failed" if s["failed_steps"] else ""),
            f"speed     {s['rates']['total']:,.0f} tokens/s ({s['rates']['prompt']:,.0f} prompt tokens/s as asked, "
            f"{s['rates']['output']:,.0f} generated/s)",
        ]
    lines.append("seconds   " + ", ".join(f"{name} {spent:.1f}" for name, spent in s["seconds"].items()))
    if s["seconds_in_steps"]:
        lines.append("in steps  " + ", ".join(f"{name} {spent:.2f}" for name, spent in s["seconds_in_steps"].items()))
    if s["limits"] is not None:
        lines.append(roofline_line(s["limits"]))
    if s["accuracy"] is not None:
        lines.append(f"accuracy  {s['accuracy']:.2%} ({s['correct']} of {s['scored']})")
    return lines
