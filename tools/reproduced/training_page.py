"""The page on claims that are trained: every word on an outcome follows from a number beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from reproduced.claims import Claim, Record, outcome, read_record
from reproduced.page import markdown_table

NAME, RECORDS = "training", "runs"  # the page, and the folder of the records beside it
_HEAD = """# Claims about training

Real runs, Megatron-Core actor and vLLM engine, of a 0.1 M-parameter model in one CPU process. Each seed is a pair: the same
prompts, the same warm-up; p and the interval of 95 % are [exact](../run-folder.md#what-difference-a-recipe-makes). A sentence
*holds* where its difference has the sign that it says at p < 0.05, *does not hold* where it has the other, and else is *not
shown*; a control is a method without its essential term: it *holds* where the effect is gone.
`python tools/reproduce.py all` takes all runs and writes this page; `NAME-runs` one claim's."""
_NOT_HERE = """## What cannot be shown at this size

Scores on the papers' benchmarks, and what needs long responses or a pre-trained model: AWPO, Tables 2, 3 and 5; GDPO, Tables
3, 5, 8 and 9; DGPO, Tables 3, 4, 13 and 14; shrinkage, Tables 1, 2, 5 and 6. RL from an instruct model beside SFT, then RL
(ToolRL): this model knows nothing before SFT. [Their recipes](../../recipes/README.md#every-table-and-figure)."""


def write_training(folder: Path, claims: Mapping[str, Claim]) -> Path:
    """Writes the page of all claims that have a record in `folder`."""
    path = folder / f"{NAME}.md"
    path.write_text(training_page(folder, claims))
    return path


def training_page(folder: Path, claims: Mapping[str, Claim]) -> str:
    files = {name: folder / RECORDS / f"{name}.json" for name in claims}
    records = {name: read_record(path) for name, path in files.items() if path.is_file()}
    rows = [
        [f"[{claims[name].title}](#{_anchor(claims[name].title)})", claims[name].says, outcome(claims[name], record)]
        for name, record in records.items()
    ]
    overview = markdown_table(("", "the paper says", "here"), rows).replace("---:", "---")
    sections = [section(name, claims[name], record) for name, record in records.items()]
    return "\n\n".join([_HEAD, overview, *sections, _NOT_HERE]) + "\n"


def section(name: str, claim: Claim, record: Record) -> str:
    """A claim: how it was made, its sentences with what decides them, and the means behind these."""
    made = (
        f"`python tools/reproduce.py {name}-runs`, seeds {record.seeds[0]} to {record.seeds[-1]}, {record.date}, "
        f"commit {record.commit}, {record.minutes:.0f} CPU minutes"
        + (f" beside those of {record.taken_over} runs that were there." if record.taken_over else ".")
    )
    sentences = [
        [one.text, one.source, str(one.difference(record.numbers)), one.verdict(record.numbers)]
        for one in claim.statements
    ]
    means = [
        [line, *(fmean(values[measure]) if measure in values else "" for measure in claim.measures)]
        for line, values in record.numbers.items()
    ]
    blocks = [
        f"## {claim.title}",
        f"<!-- figures of {' '.join(record.files)}: {record.digest} -->\n{made}",
        markdown_table(("", "of", "difference (95 %), p", "here"), sentences).replace("---:", "---"),
        *([markdown_table((f"mean of {len(record.seeds)} seeds", *claim.measures), means)] if claim.tabulates else []),
        *([record.more] if record.more else []),
        f"![{claim.title}: every seed]({name}-runs.png)",
    ]
    return "\n\n".join(blocks)


def _anchor(title: str) -> str:
    """GitHub's and the site's name for a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")
