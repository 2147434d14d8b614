"""Pages say what the planner says: each table's script computes some of its rows again, and the rest has every row."""

import re
from dataclasses import replace
from statistics import median

import pytest
from planning.making import MODELS, ROOT, script, shape

from lightning_roundpipe.estimates.outlook import look_at


def row(cells):
    return f"| {' | '.join(cells)} |\n"


def shown(pages):
    """What the script has written into its page."""
    return pages.between(pages.PAGE.read_text())


def what_fits():
    made = script("docs/make_what_fits.py")
    return made, [line for line in shown(made).splitlines() if re.match(r"\| [A-Z]", line)]


def test_the_table_of_what_fits_has_every_row():
    made, lines = what_fits()
    heads = [made.line(row, [""]).split("|")[1:4] for row in made.ROWS]
    assert [line.split("|")[1:4] for line in lines] == heads
    cells = [line.strip("| ").split(" | ")[3:] for line in lines]
    assert all(len(row) == len(made.KINDS) * len(made.GPUS) for row in cells)
    assert all(re.fullmatch(r"[\d,]+|–", cell) for row in cells for cell in row)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "kind", "gpus"), [(2, "rtx4090", 1), (5, "rtx3090", 2)])
def test_what_fits(number, kind, gpus):
    made, lines = what_fits()
    one, cells = made.ROWS[number], lines[number].strip("| ").split(" | ")[3:]
    at = list(made.KINDS).index(kind) * len(made.GPUS) + made.GPUS.index(gpus)
    assert cells[at] == made.cell(made.best(one, kind, gpus, made.shape(one, kind)))


def test_figures_in_the_text_are_those_of_their_pages():
    text = " ".join((ROOT / "README.md").read_text().split())
    docs = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("estimates", "gpu")}
    [(plan, measured)] = re.findall(r"\[([\d,]+) tokens/s\]\(docs/estimates.*?library measured ([\d,]+)\.", text)
    assert f"| {plan} | {measured} |" in docs["estimates"]
    assert text.count(plan) == 2, "the comparison has the same figure"
    [(middle, worst)] = re.findall(r"\[([\d.]+) %, its worst ([\d.]+) %\]", text)
    assert f"median error {middle} %, worst {worst} %" in docs["estimates"]
    [(plan, low, high)] = re.findall(r"planned ([\d,]+), and ([\d,]+) to ([\d,]+) were measured", text)
    assert f"at {plan} tokens/s" in docs["gpu"] and f"({low} to {high} tokens/s" in docs["gpu"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_estimates():
    """What is predicted beside what the paper measured."""
    bench = script("benchmarks/bench_validation.py")
    rows = [bench.predict(one) for one in bench.read_rows()]
    page = (ROOT / "docs" / "estimates.md").read_text()
    assert bench.markdown(rows) in page and f"{bench.summary(rows)}." in page
    errors = [abs(one.error) for one in rows]
    assert median(errors) <= 0.04 and max(errors) <= 0.20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_papers_models():
    """Every figure under the plans on the page, and the search finds plans that are hardly slower."""
    pages = script("docs/make_paper_models.py")
    given = list(zip(pages.ROWS, pages.plans(), strict=True))
    there = [look_at(shape(one.name), replace(one.request, plan=text)) for one, text in given]
    assert shown(pages) == pages.figures(there)
    assert {one.name for one in pages.ROWS} == set(MODELS)
    assert all(outlook.fits_device and outlook.fits_host for outlook in there)
    for (one, _), known in zip(given, there, strict=True):
        found = look_at(shape(one.name), replace(one.request, plan=None))
        assert found.tokens_per_s == pytest.approx(known.tokens_per_s, rel=0.06), one.name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_machines():
    """Of one model, one and four machines."""
    pages = script("docs/make_several_machines_plans.py")
    one, page = pages.ROWS[0], shown(pages)
    pages.MACHINES = (1, 4)
    for machines, network, found in pages.outlooks(one, pages.shape_for(one, 1, 0)):
        assert row(pages.cells(machines, network, found)) in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_long_sequences():
    pages = script("docs/make_long_sequences.py")
    for one, gpus in ((pages.ROWS[0], 1), (pages.ROWS[1], 8)):
        assert row(pages.cells(one, pages.find(one, gpus))) in shown(pages)


def test_the_pages_have_every_row():
    pages = script("docs/make_several_machines_plans.py")
    page = shown(pages)
    assert all(f"### {one.title}\n" in page and one.command in page for one in pages.ROWS)
    assert page.count("Gbit/s") == len(pages.ROWS) * (len(pages.MACHINES) - 1) * len(pages.NETWORKS)
    pages = script("docs/make_long_sequences.py")
    page = shown(pages)
    for one in pages.ROWS:
        assert [line.split(" | ")[1] for line in page.splitlines() if line.startswith(f"| {one.title} |")] == ["1", "8"]
    assert pages.ROWS[1].command in page
