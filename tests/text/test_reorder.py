"""Advice on a template: what all rows share first, then what leaves least to compute; paragraphs stay whole."""

from __future__ import annotations

import pytest

from batchgen.text.reorder import reordered

ROWS = [{"doc": f"document {i // 4}", "q": f"question {i}", "n": None} for i in range(12)]


@pytest.mark.parametrize(
    ("template", "better"),
    [
        ("{{ q }}\n\nDocument: {{ doc }}\n\nBe brief.", "Be brief.\n\nDocument: {{ doc }}\n\n{{ q }}"),
        ("Q: {{ q }}\nOn: {{ doc }}", "On: {{ doc }}\nQ: {{ q }}"),
        ("Be brief.\n\n{{ doc }}\n\n{{ q }}\n", None),
        ("One line: {{ q }} {{ doc }}", None),
        ("{{ q }}\n \nA\n\nB", "A\n\nB\n\n{{ q }}"),
        ("{{ q }}\n\n{{ n | default('none') }}", "{{ n | default('none') }}\n\n{{ q }}"),
    ],
)
def test_paragraphs_come_in_the_order_of_what_rows_share(template: str, better: str | None) -> None:
    assert reordered(template, ROWS) == better


@pytest.mark.parametrize("template", ["{% if q %}\n\n{{ q }}\n\n{% endif %}", "{{ q\n\n~ doc }}"])
def test_what_cannot_be_taken_apart_is_left_alone(template: str) -> None:
    with pytest.raises(ValueError, match=r"statements|reaches over"):
        reordered(template, ROWS)


def test_a_long_text_goes_before_few_short_questions() -> None:
    rows = [{"doc": f"{i // 3} " + "long " * 50, "q": f"kind {i % 3}"} for i in range(30)]
    assert reordered("{{ q }}\n\n{{ doc }}", rows) == "{{ doc }}\n\n{{ q }}"
    assert reordered("{{ doc }}\n\n{{ q }}", rows) is None
    many = "\n".join("{{ q }} {{ doc }}" for _ in range(9))
    assert reordered(many, rows) is None, "too many to try each order, and none is better"
