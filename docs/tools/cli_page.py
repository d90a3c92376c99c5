"""Write docs/cli.md, the reference of the command line, from what `--help` prints: `python -P docs/tools/cli_page.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from mmcompile.cli.command_group import COMMANDS, EXAMPLES, app

PAGE = Path(__file__).parents[1] / "cli.md"
COLUMNS = 120
HEAD = """# Command line

This page is made by `make docs` from what `--help` prints. Every command has `--json`, and `--help` with examples that work.

MODEL is a `config.json`, a folder with one, a Hugging Face id in the local cache, or `package.module:function` returning a
model or (model, batch). DATA is a folder with a `.safetensors` file for each sample, or `package.module:function` returning a
list of samples.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a problem was found; the message says what to do. `MMCOMPILE_DEBUG=1` adds the traceback, `--json` prints it as an object |
| 2 | bad usage |
| 130 | interrupted |

Options can come from a file: `--dump-config` prints all options of a command as YAML, `--config FILE` reads such a file (or
TOML). Its sections are `model`, `example`, `plan`, `train`, `run` and `elastic`; options that are typed override it, and an
unknown key is refused with its name and the nearest known ones.

## At a glance

```
mmcompile plan examples/configs/llava-1.5-7b.json --cluster 2x8xA100-80G --train projector -o plan.json
mmcompile check MODEL --stats images/ --cluster 8xH100 --global-batch 64   # will the worst sample fit? what only seems to train?
mmcompile show plan.json                          # the table and the graph of stages
mmcompile explain language_model.1 --plan plan.json   # why it is there, what it waits for, what a move would change
mmcompile diff plan.json other.json               # what differs
mmcompile simulate --plan plan.json --schedule all    # idle time by cause, memory of each rank, for every schedule
mmcompile step --plan plan.json --stats images/ --png step.png   # one step balanced: every microbatch before and after
mmcompile stats images/ -o stats.json             # percentiles of the data, and its worst samples
mmcompile profile MODEL -o calibration.json       # measure this machine
mmcompile stages plan.json --emit svg -o plan.svg # or text, dot
mmcompile stages MODEL --plan plan.json --stage language_model.0 --emit source
mmcompile plan MODEL --cluster 8xH100 --attention bitfield --context-parallel 4
mmcompile train MODEL --data DATA --steps 100 --out runs/first --save checkpoint --export model
mmcompile train MODEL --data DATA --tensor-parallel language_model=2 --autocast all --recompute selective --shard-optimizer
mmcompile trace runs/first                        # trace.json and timeline.png of its last step
mmcompile plan MODEL --cluster 16x8xA100-80G --fault-tolerance 1 -o spot.json   # templates for 15 nodes, for 14, …
mmcompile simulate --plan spot.json --trace spot.csv --emit png -o spot.png   # useful time over a trace of spot instances
mmcompile train MODEL --data DATA --fault-tolerance 1 --nodes 5 --reduction fixed   # nodes played here by processes
```
"""


def page() -> str:
    """Return the text of docs/cli.md."""
    return "\n".join([HEAD, *(line for name in COMMANDS for line in _section(name))])


def _section(name: str) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"```\n{_help(name)}\n```\n"
    if name in EXAMPLES:
        lines = "\n".join(EXAMPLES[name])
        yield f"Examples:\n\n```\n{lines}\n```\n"


def _help(name: str) -> str:
    """Return the help of a command without its examples, as a terminal of `COLUMNS` columns shows it."""
    environment = {"COLUMNS": str(COLUMNS), "TERM": "dumb", "TERMINAL_WIDTH": str(COLUMNS)}
    printed = CliRunner().invoke(app, [name, "--help"], prog_name="mmcompile", env=environment)
    assert printed.exit_code == 0, printed.output
    text, _, _ = printed.output.partition("\n Examples")
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).strip("\n")


if __name__ == "__main__":
    PAGE.write_text(page())
