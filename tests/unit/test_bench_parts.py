"""Parts of a benchmark run: exponents, verdicts on bars, and the figures that are kept, shown, drawn, compared or left
out."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bench.__main__ as command
from bench import freshness, part_report, take_over
from bench.drawing import Scale
from bench.parts import Curve, Measured, Part, PartResult, Points
from bench.plots import pictures
from bench.report import markdown
from bench.result import RunResult
from bench.slopes import batches_to_break_even
from bench.whole_system import FAILED, PARTS, Freshness, TakeOver, freshness_result, measured, take_over_result
from tests.kafka_server import KafkaServer


def curve(power: float, name: str = "get", unit: str = "ms") -> Curve:
    return Curve("Rows", name, "rows", unit, tuple((size, 3.0 * size**power) for size in (10.0, 100.0, 1000.0)))


def every_part() -> tuple[PartResult, ...]:
    return (
        freshness_result("freshness", "Freshness", 1.0, {"rate": 5}, [0.05, 0.08, 0.25]),
        take_over_result("take_over", "Take-over", 1.0, {"trials": 2}, {"kill": [0.4, 0.7], "start": [1.5]}, 0),
        PartResult(
            "growth", "Growth", 1.0, {"rows": "10, 100"}, curves=(curve(1), curve(0, "put"), curve(2, "m", "MiB"))
        ),
        PartResult("crossover", "Crossover", 1.0, {"base": 1000}, (Measured("times", 2.0, "times"),), (curve(0.5),)),
    )


def result(*parts: PartResult) -> RunResult:
    return RunResult("full", 5, 1.0, {"pylance": "14"}, {"cores": "2"}, (), parts)


@pytest.mark.parametrize("power", [-0.5, 0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_that_power(power: float) -> None:
    assert curve(power).exponent == pytest.approx(power)
    assert curve(power).last_step == pytest.approx(power)


def test_a_fixed_cost_hides_growth_less_in_the_last_step() -> None:
    fixed = Curve("Rows", "get", "rows", "ms", tuple((size, 100.0 + size) for size in (10.0, 1000.0, 100_000.0)))
    assert fixed.exponent < 0.8 < fixed.last_step
    assert Curve("Rows", "one", "rows", "ms", ((10.0, 5.0),)).exponent == 0.0


def test_points_are_collected_by_curve_and_sorted() -> None:
    found = Points("Rows", "rows")
    found.note("get", 100, 2.0)
    found.note("get", 10, 1.0)
    found.note("memory", 10, 5.0, "MiB", panel="Apart")
    get, memory = found.curves()
    assert get.points == ((10.0, 1.0), (100.0, 2.0))
    assert (memory.panel, memory.unit) == ("Apart", "MiB")


def test_bars_have_verdicts() -> None:
    fresh, gone, *_ = every_part()
    assert [(each.name, each.verdict) for each in fresh.figures[:2]] == [
        ("event to latest, p50", "held"),
        ("event to latest, p99", "held"),
    ]
    assert {each.name: each.verdict for each in gone.figures if each.bar is not None} == {
        "kill, p99": "missed",
        "start, p50": "held",
        "puts that raised an error": "held",
    }


def test_parts_are_kept_and_a_file_from_before_has_none(tmp_path: Path) -> None:
    kept = tmp_path / "result.json"
    result(*every_part()).write(kept)
    again = RunResult.read(kept)
    assert [each.name for each in again.parts] == [part.name for part in PARTS]
    assert again.parts[1] == every_part()[1]
    replace(again, parts=()).write(kept)
    kept.write_text(kept.read_text().replace('"parts": []', '"rounds": 5'))
    assert RunResult.read(kept).parts == ()


def test_every_part_is_in_the_readme_and_has_a_picture_that_parses() -> None:
    shown = markdown(result(*every_part()))
    drawn = pictures(result(*every_part()))
    assert set(drawn) == {f"{part.name}.svg" for part in PARTS}
    for name, picture in drawn.items():
        assert f"]({name})" in shown
        assert ET.fromstring(picture).tag.endswith("svg")
        assert "nan" not in picture
        assert "prefers-color-scheme:dark" in picture
    assert "| kill, p99 | 697 ms | 500 ms | **missed** |" in shown


def test_a_part_that_cannot_run_is_one_line_without_a_picture(tmp_path: Path) -> None:
    part = SimpleNamespace(name="freshness", title="Freshness", absent=lambda: "Java 17 or later is needed")
    found = measured(part, tmp_path / "at", smoke=True)  # type: ignore[arg-type]
    assert found.missing == "Java 17 or later is needed"
    assert list(part_report.lines(found)) == ["  not measured: Java 17 or later is needed"]
    assert pictures(result(found)) == {}
    assert "Not measured: Java 17 or later is needed." in markdown(result(found))


def test_a_part_that_fails_keeps_the_rest_and_gives_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(at: Path, *, smoke: bool) -> PartResult:
        raise take_over.LostRows("keys [1]\nwere acked")

    failing: Any = SimpleNamespace(name="take_over", title="Take-over", absent=lambda: "", measure=fail)
    whole: Any = SimpleNamespace(
        name="growth", title="Growth", absent=lambda: "", measure=lambda at, smoke: every_part()[2]
    )
    parts: tuple[Part, ...] = (failing, whole)
    monkeypatch.setattr(command, "PARTS", parts)
    kept = tmp_path / "result.json"
    arguments = ["take_over", "growth", "--smoke", "--workdir", str(tmp_path / "work"), "--out", str(kept)]
    assert command.main(arguments) == 1
    assert "not measured: failed: LostRows after 0 s: keys [1] were acked" in capsys.readouterr().out
    first, second = RunResult.read(kept).parts
    assert first.missing.startswith(FAILED)
    assert second.curves
    assert list((tmp_path / "work").iterdir()) == []


def test_java_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert Freshness().absent().startswith(f"Spark needs Java 17 or later and JAVA_HOME={tmp_path} is no working Java")


def test_freshness_and_take_over_run_their_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KafkaServer, "started", lambda at: nullcontext())
    monkeypatch.setattr(freshness, "measure", lambda kafka, at, options: SimpleNamespace(waits=[options.seconds]))
    fresh = Freshness().measure(tmp_path, smoke=True)
    assert fresh.figures[0].value == 1e3 * freshness.SMOKE_SECONDS
    monkeypatch.setattr(
        take_over, "measure", lambda at, place, trials, freeze, rest: ({"kill": [0.3] * trials}, ["late"])
    )
    gone = TakeOver().measure(tmp_path, smoke=True)
    assert [each.value for each in gone.figures] == [300.0, 300.0, 1.0]


def test_two_results_are_compared_by_figures_and_verdicts() -> None:
    a, b = list(every_part()), list(every_part())
    b[1] = take_over_result("take_over", "Take-over", 1.0, {"trials": 2}, {"kill": [0.4, 0.45], "start": [1.5]}, 0)
    b[3] = replace(b[3], parameters={"base": 5})
    lines = list(part_report.changes(result(*a), result(*b)))
    assert "take_over: kill, p99 (ms): 697 in A, 450 in B  missed in A, held in B" in lines
    assert "growth: Rows, get, exponent: 1 in A, 1 in B" in lines
    assert "crossover: not compared, the parameters differ" in lines
    assert lines[-1] == "verdicts on bars do not agree: 1 of 5 differ"
    assert list(part_report.changes(result(), result(*b))) == []


def test_the_line_of_a_comparison_is_shown_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path in paths:
        result(*every_part()).write(Path(path))
    assert command.main(["compare", *paths]) == 0
    assert "verdicts on bars agree: 0 of 5 differ" in capsys.readouterr().out


def test_where_direct_merges_are_less_work() -> None:
    assert batches_to_break_even(one=60.0, ten=15.0, direct=35.0) == pytest.approx(2.0)
    assert batches_to_break_even(one=60.0, ten=15.0, direct=70.0) == 1.0
    assert batches_to_break_even(one=60.0, ten=42.0, direct=39.0) is None


def test_scales_hold_their_values_between_whole_decades() -> None:
    scale = Scale.over([0.3, 40.0], 0, 300)
    assert scale.ticks == [0.1, 1.0, 10.0, 100.0]
    assert [round(scale(tick)) for tick in scale.ticks] == [0, 100, 200, 300]
    assert Scale(0, 1600, 0, 100, log=False).ticks == [0, 500, 1000, 1500]
