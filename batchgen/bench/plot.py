"""The benchmark as a picture: how many times batchgen's time each system takes. The only file that imports matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from batchgen.bench.measure import SYSTEMS, label

# One hue for each system (safe for colour-blind readers), lighter where it is given the file's order
HUES = {"batchgen": "#222222", "generate": "#999999", "continuous": "#CC79A7", "vllm": "#0072B2", "llama_cpp": "#E69F00"}
ABOUT = {"ample": "everything fits", "scarce": "a tenth of the prompts' tokens fits"}


def draw(result: dict[str, Any], file: Path) -> None:
    """One panel for each setting of KV memory; groups of bars by workload; a bar labelled ">" was stopped there."""
    workloads = result["workloads"]
    settings = list(next(iter(workloads.values()))["settings"])
    keys = [f"{name} {order}".strip() for name, spec in SYSTEMS.items() for order in spec.orders]
    keys = [k for k in keys if any(_height(w["settings"][s], k) for w in workloads.values() for s in settings)]
    heights = [_height(w["settings"][s], k) for w in workloads.values() for s in settings for k in keys]
    top = 1.25 * max((h[0] for h in heights if h), default=1.0)
    bottom = min([0.5, *(0.9 * h[0] for h in heights if h)])
    figure, panels = plt.subplots(len(settings), 1, figsize=(11, 3.4 * len(settings) + 0.6), sharex=True, squeeze=False)
    width = 0.84 / max(len(keys), 1)
    for panel, setting in zip(panels[:, 0], settings):
        for number, key in enumerate(keys):
            for group, workload in enumerate(workloads.values()):
                found = _height(workload["settings"][setting], key)
                x = group + (number - (len(keys) - 1) / 2) * width
                if found is None:
                    panel.text(
                        x, 1.1 * bottom, "not run", ha="center", va="bottom", fontsize=6.5, rotation=90, color="#666666"
                    )
                    continue
                height, stopped = found
                panel.bar(x, height, 0.92 * width, color=_color(key))
                told = f">{height:.0f}" if stopped else f"{height:.1f}"
                panel.text(x, height * 1.04, told, ha="center", va="bottom", fontsize=7)
        panel.axhline(1.0, color=HUES["batchgen"], linewidth=0.8, linestyle=":")
        panel.set_yscale("log")
        panel.set_ylim(bottom, max(top, 2.0))
        panel.set_yticks([t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if bottom <= t <= top], minor=False)
        panel.yaxis.set_major_formatter("{x:g}x")
        panel.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        panel.set_ylabel("time / batchgen's time")
        panel.set_title(f"{setting} KV memory: {ABOUT.get(setting, '')}", fontsize=10, loc="left")
        panel.grid(axis="y", linewidth=0.4, alpha=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    last = panels[-1, 0]
    last.set_xticks(range(len(workloads)), list(workloads))
    last.tick_params(axis="x", length=0)
    handles = [plt.Rectangle((0, 0), 1, 1, color=_color(k)) for k in keys]
    figure.suptitle(
        "Same weights (float32), prompts, number of tokens out, KV memory and cores: lower is better", fontsize=11
    )
    figure.legend(handles, [label(k) for k in keys], loc="lower center", ncols=4, frameon=False, fontsize=9)
    caption = f"{result['cpu']}, {result['threads']} threads; {result['model']}"
    figure.text(0.995, 0.004, caption, ha="right", va="bottom", fontsize=7, color="#666666")
    figure.tight_layout(rect=(0, 0.09, 1, 0.99))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _color(key: str) -> tuple[float, float, float]:
    name, _, order = key.partition(" ")
    red, green, blue = matplotlib.colors.to_rgb(HUES[name])
    share = 0.45 if order == "file order" else 1.0  # of the hue; the rest is white
    return 1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue)


def _height(setting: dict[str, Any], key: str) -> tuple[float, bool] | None:
    """(times batchgen's seconds, whether it was stopped there); None if there is no time."""
    systems = setting["systems"]
    facts, ours = systems.get(key, {}), systems.get("batchgen", {}).get("seconds")
    if not ours:
        return None
    if "seconds" in facts:
        return facts["seconds"] / ours, False
    return (facts["stopped_after"] / ours, True) if "stopped_after" in facts else None


if __name__ == "__main__":  # a result (bench.json) again: python -m batchgen.bench.plot bench.json bench.png
    draw(json.loads(Path(sys.argv[1]).read_text("utf-8").splitlines()[-1]), Path(sys.argv[2]))
