"""What the report makes of a results file."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from bench import __main__ as bench_main
from bench import readme
from bench.compare import compare
from bench.readme import BEGIN, END, NoPlace, pages, with_table
from bench.report import page
from bench.report.estimate import Estimate, differ, number, pooled_noise, shown, verdict
from bench.report.sections import sections
from bench.report.table import Table
from bench.report.tradeoffs import against_releases, lookups, main_table
from bench.results import load, save
from bench.server_process import ROOT
from tests.bench.sample_results import sample_results


def test_a_median_has_the_range_of_few_rounds_and_the_bootstrap_of_many() -> None:
    assert Estimate.of([3.0, 1.0, 2.0]) == Estimate(2.0, 1.0, 3.0, 3)
    many = Estimate.of([1.0] * 20 + [100.0])
    assert (many.median, many.low, many.high) == (1.0, 1.0, 1.0)
    assert Estimate.of([1.0, 2.0, 3.0, 4.0, 5.0]).low < 3.0 < Estimate.of([1.0, 2.0, 3.0, 4.0, 5.0]).high
    with pytest.raises(ValueError, match="no round"):
        Estimate.of([])


def test_differences_within_the_rounds_are_noise() -> None:
    a, b, c = Estimate.of([1.0, 1.4]), Estimate.of([1.3, 1.6]), Estimate.of([1.5, 1.8])
    once = Estimate.of([9.0])
    assert not differ(a, b) and differ(a, c) and not differ(a, once)
    assert verdict(a, b) == "no difference beyond the noise"
    assert verdict(a, c) == "more" and verdict(c, a) == "less"
    assert "one round only" in verdict(a, once)


def test_noise_is_pooled_over_cases_relative_to_their_means() -> None:
    assert pooled_noise([[9.0, 11.0], [90.0, 110.0]]) == pytest.approx(0.1 * 2**0.5)
    assert pooled_noise([[9.0, 11.0], [5.0], [0.0, 0.0], [-1.0, 1.0]]) == pytest.approx(0.1 * 2**0.5)
    assert pooled_noise([[5.0], [7.0]]) == 0.0


def test_rounds_that_agree_by_chance_do_not_make_a_difference() -> None:
    """Two close rounds on either side of a gap that is no wider than what the run's rounds are apart."""
    noise = pooled_noise([[90.0, 110.0]] * 5)
    low, high, far = (Estimate.of(values, noise) for values in ([95.0, 96.0], [104.0, 105.0], [149.0, 151.0]))
    assert low.high < high.low
    assert verdict(low, high) == "no difference beyond the noise"
    assert verdict(low, far) == "more"


def test_the_same_thing_measured_twice_is_seldom_told_apart() -> None:
    """40 cases of one distribution, two rounds each: their intervals alone would part a third of the pairs."""
    rounds = np.random.default_rng(3).lognormal(0, 0.1, (40, 2)).tolist()
    estimates = [Estimate.of(values, pooled_noise(rounds)) for values in rounds]
    apart = [differ(a, b) for a, b in combinations(estimates, 2)]
    assert sum(apart) / len(apart) < 0.08


def test_what_was_measured_once_is_not_called_equal() -> None:
    once = {section.id: section for section in sections(Table(sample_results(rounds=1)))}
    said = " ".join(sentence for section in once.values() for sentence in section.says)
    assert "one round only" in said and "no difference" not in said


def test_figures_that_are_missing_leave_their_sentence_out() -> None:
    results = sample_results()
    for record in results.records:
        record.figures = {
            name: value for name, value in record.figures.items() if name != "ready_s" and "segment" not in name
        }
    assert page.html(results)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.04123, "0.0412"), (1.254, "1.25"), (35.12, "35.1"), (1490.4, "1,490"), (-2.5, "-2.50")],
)
def test_numbers_show_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_cell_shows_its_interval_unless_it_was_measured_once() -> None:
    assert shown(Estimate.of([1.0, 3.0])) == "2.00 (1.00–3.00)"
    assert shown(Estimate.of([1.0])) == "1.00"
    assert shown(None) == "–"


def test_every_suite_has_its_plots_and_its_table() -> None:
    made = {section.id: section for section in sections(Table(sample_results()))}
    assert all(section.measured for section in made.values())
    with_plots = {"steps", "overhead", "arrivals", "payload", "dispatch", "serving", "idle", "start"}
    assert {name for name, section in made.items() if section.plots} == with_plots
    assert {name for name, section in made.items() if section.says} == with_plots | {"floors"}


def test_a_file_of_one_suite_says_that_the_others_were_not_measured() -> None:
    results = sample_results()
    results.records = [record for record in results.records if record.suite == "idle"]
    assert [section.id for section in sections(Table(results)) if section.measured] == ["idle"]
    assert page.html(results).count("Not measured.") == 9
    assert page.markdown(results).count("Not measured.") == 9


def test_a_file_of_one_stage_leaves_the_other_rows_empty() -> None:
    results = sample_results()
    results.records = [record for record in results.records if record.stage == "stage2"]
    rows = {row[0]: row[3:] for row in main_table(Table(results)).rows}
    assert "–" not in rows["stage 2"]
    assert set(rows["stage 1"]) == {"– / –", "–"}
    assert page.html(results)


def test_a_changed_figure_changes_the_table_and_the_page() -> None:
    results = sample_results()
    before, page_before = main_table(Table(results)), page.html(results)
    place, record = next(
        (i, r) for i, r in enumerate(results.records) if r.suite == "step_overhead" and r.case["running"] == 32
    )
    results.records[place] = replace(record, figures={**record.figures, "period_us_mean": 77_777.0})
    after = main_table(Table(results))
    assert [row for row in after.rows if row not in before.rows] == [after.rows[0]]
    assert "77,777" in after.rows[0][3]
    assert "77,777" in page.html(results) and "77,777" not in page_before


def test_segments_that_no_family_knows_are_shown_as_other() -> None:
    steps = sections(Table(sample_results()))[0]
    assert all(">other<" in svg for _, svg in steps.plots)


def test_ratios_to_the_releases_are_of_the_figures_in_the_file() -> None:
    grid = against_releases(Table(sample_results()))
    row = next(row for row in grid.rows if row[:3] == ["stage 1", "TP 1", "1"])
    ours = float(row[3].split()[0])
    assert row[6] == number(ours / float(row[5].replace(",", "")))


def test_json_has_every_case_with_its_interval() -> None:
    results = sample_results()
    rows = json.loads(page.as_json(results))["rows"]
    assert len(rows) == len(results.records) // 2
    assert all(figure["low"] < figure["median"] < figure["high"] for row in rows for figure in row["figures"].values())


def test_compare_tells_a_change_from_noise() -> None:
    before, after = sample_results(), sample_results()
    moved = after.records[0]
    for place, record in enumerate(after.records):
        if (record.suite, record.stage, record.case) == (moved.suite, moved.stage, moved.case):
            after.records[place] = replace(record, figures={**record.figures, "period_us_mean": 5_000.0 + place})
    told = [change for change in compare(before, after) if change[-1] in ("more", "less")]
    assert [(change[0].case, change[1], change[-1]) for change in told] == [(moved.case, "period_us_mean", "more")]


def test_the_commands_refuse_a_broken_file_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, broken = tmp_path / "whole.json", tmp_path / "broken.json"
    save(sample_results(), whole)
    broken.write_text(whole.read_text()[:-200])
    for command in (["report", str(broken)], ["compare", str(whole), str(broken)], ["readme", str(broken)]):
        assert bench_main.main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and str(broken) in error


@pytest.mark.parametrize(("name", "beginning"), [("r.html", "<!doctype"), ("r.md", "# What"), ("r.json", "{")])
def test_the_format_is_what_the_file_is_called(tmp_path: Path, name: str, beginning: str) -> None:
    save(sample_results(), tmp_path / "results.json")
    assert bench_main.main(["report", str(tmp_path / "results.json"), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(beginning)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main.main(["report", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.strip().endswith("none.json cannot be read: No such file or directory")


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    save(sample_results(), results)
    assert bench_main.main(["report", str(results), "-o", str(tmp_path / "no folder" / "report.html")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no folder" in error


def test_the_table_goes_between_its_marks() -> None:
    text = f"above\n{BEGIN}\nold\n{END}\nbelow\n"
    assert with_table(text, "new") == f"above\n{BEGIN}\n\nnew\n{END}\nbelow\n"
    with pytest.raises(NoPlace, match="lacks"):
        with_table("nothing here", "new")


def test_a_readme_without_the_marks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(sample_results(), tmp_path / "results.json")
    (tmp_path / "README.md").write_text("no marks")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert bench_main.main(["readme", str(tmp_path / "results.json")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "lacks" in error
    assert (tmp_path / "README.md").read_text() == "no marks"


def test_the_pages_show_the_committed_results() -> None:
    results = load(ROOT / "bench" / "results" / "quick.json")
    assert {path.read_text(encoding="utf-8") == text for path, text in pages(results).items()} == {True}


def test_the_conclusions_of_the_page_are_those_of_the_committed_results() -> None:
    ask = lookups(Table(load(ROOT / "bench" / "results" / "quick.json")))

    def value(name: str, *of: object) -> float:
        return float(ask[name](*of).replace(",", ""))

    labels = ["stage 1", "stage 2", "stage 3", "stage 4, in turn", "stage 4"]
    at_tp_2 = {label: value("period", label, 2, 1) for label in labels}
    assert min(at_tp_2, key=at_tp_2.__getitem__) == "stage 3"
    assert min(at_tp_2["stage 4"], at_tp_2["stage 4, in turn"]) > max(at_tp_2[label] for label in labels[:3])
    assert value("period", "stage 1", 1, 1) > 2 * value("period", "stage 2", 1, 1)  # a timer's rounding
    assert value("idle", "stage 2") > value("idle", "stage 1")
    assert value("period", "stage 3", 1, 32) < 2 * value("period", "stage 3", 1, 1)
    assert value("picture", "stage 3", "buffer") < value("picture", "stage 3", "list")
    for label in ("stage 2", "stage 4"):
        assert value("dispatch", label, "shortest_queue") < value("dispatch", label, "round_robin")
    first_tokens = [value("first_token", label) for label in labels if label != "stage 4, in turn"]
    assert max(first_tokens) == first_tokens[0]
    assert value("release", "0.1.17", "TP 1", "1") > 5 * value("period", "stage 2", 1, 1)


def test_a_page_has_a_dash_for_what_was_not_measured() -> None:
    results = sample_results()
    assert "– µs a forward" not in page.numbers_page(results)
    results.records = []
    assert "– µs a forward" in page.numbers_page(results)
