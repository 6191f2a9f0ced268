"""The bench report: what a row says of its goal, and that a report is written whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.__main__ import main, suites
from tests.bench.rows import Row, markdown, with_table, write_report


@pytest.mark.parametrize(
    "row, met, broken",
    [
        pytest.param(Row("a", 5, "x", goal=4, floor=2), True, False, id="goal-reached"),
        pytest.param(Row("a", 3, "x", goal=4, floor=2), False, False, id="between"),
        pytest.param(Row("a", 1, "x", goal=4, floor=2), False, True, id="below-floor"),
        pytest.param(Row("a", 2, "x", floor=2), True, False, id="floor-alone"),
        pytest.param(Row("a", 5, "x"), None, False, id="recorded-only"),
        pytest.param(
            Row("a", 3, "s", goal=4, floor=9, lower_is_better=True), True, False, id="lower-reached"
        ),
        pytest.param(
            Row("a", 10, "s", goal=4, floor=9, lower_is_better=True), False, True, id="lower-broken"
        ),
    ],
)
def test_a_row_knows_its_goal(row: Row, met: bool | None, broken: bool) -> None:
    assert (row.met, row.broken) == (met, broken)


@pytest.mark.parametrize(
    "fields, message",
    [
        pytest.param({"value": float("nan")}, "not a finite number", id="nan"),
        pytest.param({"unit": ""}, "needs an id and a unit", id="no-unit"),
        pytest.param({"peer": "sdpa"}, "come together", id="peer-without-value"),
    ],
)
def test_a_row_without_sense_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Row(**({"id": "a", "value": 1.0, "unit": "x"} | fields))  # type: ignore[arg-type]


def test_a_report_has_the_agreed_keys(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.json"
    write_report(out, [Row("a", 1, "tokens/s", goal=2, peer="sdpa", peer_value=1.5)])
    assert json.loads(out.read_text()) == [
        {
            "id": "a",
            "value": 1,
            "unit": "tokens/s",
            "goal": 2,
            "floor": None,
            "peer": "sdpa",
            "peerValue": 1.5,
            "met": False,
        }
    ]
    assert [one.name for one in out.parent.iterdir()] == ["report.json"]


def test_a_failed_report_leaves_the_last_one(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    write_report(out, [Row("a", 1, "x")])
    with pytest.raises(ValueError, match="twice: b"):
        write_report(out, [Row("b", 1, "x"), Row("b", 2, "x")])
    assert json.loads(out.read_text())[0]["id"] == "a"


def test_an_unknown_suite_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-suite"]) == 2
    assert "no-such-suite" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.split() == suites()


def test_a_table_for_the_documentation_says_goal_peer_and_verdict() -> None:
    rows = [
        Row("a.speed", 2.0, "GB/s", goal=1.5, peer="other", peer_value=1.0),
        Row("a.time", 3.0, "ms", goal=2.0, lower_is_better=True),
        Row("a.fact", 1.0, "bool"),
    ]
    assert markdown(rows).splitlines()[2:] == [
        "| a.speed | 2 | GB/s | >= 1.5 | other | 1 | met |",
        "| a.time | 3 | ms | <= 2 |  |  | **missed** |",
        "| a.fact | 1 | bool |  |  |  |  |",
    ]


def test_a_page_is_changed_only_where_its_table_stands() -> None:
    old, new = markdown([Row("a.speed", 1.0, "GB/s")]), markdown([Row("a.speed", 2.0, "GB/s")])
    other = "| block | 1 |\n|---|--:|\n| 16 KiB | 0.6 |"
    page = f"# Words\n\n{other}\n\n{{}}\n\nmore words\n"
    assert with_table(page.format(old), new) == page.format(new)
    assert with_table(f"# Words\n{old}\n", new + "\n") == f"# Words\n{new}\n"
    for wrong in ("# Words\n", page.format(f"{old}\n\n{old}")):
        with pytest.raises(ValueError, match="not one"):
            with_table(wrong, new)
