"""The command line: parse, call, print. Heavy imports only inside commands, so that --help, status and typos are quick."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from batchgen import __version__
from batchgen.environment import prepare_environment
from batchgen.errors import BatchgenError, Interrupted, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Offline batch inference for language models: every row of a Parquet file answered exactly once.",
    epilog="Exit codes: 0 all rows ok; 2 the job cannot start as asked; 3 done, some rows failed; 4 stopped, too many "
    "rows failed; 75 interrupted or hung, run the same command again; 1 anything else.",
)

JobFile = Annotated[Path, typer.Argument(help="The job file, YAML; every key is explained in jobs/eval.yaml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Change a key of the job file: --set input.limit=12")]
Folder = Annotated[Path, typer.Argument(help="The run folder (output.path of the job)")]


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"batchgen {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error")] = False,
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it")] = False,
) -> None:
    """Options before the command."""


@app.command()
def run(
    job_file: JobFile,
    overrides: Overrides = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew; what is in the run folder DIR is kept as DIR.1, DIR.2 ...")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="failed|truncated|KEYFILE",
            help="Answer these rows of a finished job once more, with other sampling or engine settings if you like. "
            "KEYFILE: one id a line (without input.id_column: the column `row`)",
        ),
    ] = None,
) -> None:
    """Answer every row of a job; go on where an earlier run of it stopped."""
    if restart and only is not None:
        raise UsageError("--restart begins with no answers, --only goes on from those that are there; give one of them")
    from batchgen.signals import StopSignals

    with StopSignals(last=True) as stop:
        with stop.deferred():  # an import that breaks off leaves half a module; this one takes seconds
            from batchgen.job import load_job

            job = load_job(job_file, overrides or [])
            from batchgen.data.rerun import read_choice

            choice = None if only is None else read_choice(only)
            from batchgen.runner import run_job
        code = run_job(job, restart=restart, only=choice)
    raise typer.Exit(code)


@app.command()
def plan(job_file: JobFile, overrides: Overrides = None) -> None:
    """Show what a job would do: rows that would fail, lengths, duplicates, prefix savings, memory. Loads no weights."""
    from batchgen.job import load_job

    job = load_job(job_file, overrides or [])
    from batchgen.planner import plan_job

    for line in plan_job(job):
        print(line)


@app.command()
def status(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="As one JSON object")] = False) -> None:
    """Show how far a run is, while it works or after."""
    from batchgen.data.status import read_status

    s = read_status(folder)
    if as_json:
        facts = {name: getattr(s, name) for name in s.__dataclass_fields__}
        print(json.dumps(facts | {"path": str(s.path)}))
        return
    owed = "?" if s.num_answers is None else str(s.num_answers)
    print(f"{s.path}: {s.num_committed} of {owed} answers committed ({s.num_failed} failed) in {s.num_parts} parts")
    if s.last_commit_at is not None:
        import datetime

        print(f"last commit at {datetime.datetime.fromtimestamp(s.last_commit_at).isoformat(' ', 'seconds')}")
    print(f"at work: {s.locked_by}" if s.locked_by else "nobody works on it")
    print(f"finished: {s.path / 'results'}" if s.is_finished else "not finished; run the same job file again to go on")


@app.command()
def show(folder: Folder, rows: Annotated[int, typer.Option("-n", help="How many rows")] = 3, width: int = 100) -> None:
    """Print where the results of a run are, and their first rows."""
    from batchgen.data.show import first_rows

    for line in first_rows(folder, rows, width):
        print(line)


@app.command()
def merge(folder: Folder) -> None:
    """Write results/ of a run again from its committed parts (`run` does it at its end)."""
    from batchgen.runner import merge_again

    summary = merge_again(folder)
    print(f"{summary.num_answers} answers in {folder / 'results'}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a job file, for editors."""
    from batchgen.job import job_json_schema

    print(json.dumps(job_json_schema(), indent=2))


bench = typer.Typer(no_args_is_help=True, help="Measure and predict.")
app.add_typer(bench, name="bench")


@bench.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def simulate(context: typer.Context) -> None:
    """A whole job on a simulated GPU, against the policies of serving engines; --help lists its options."""
    from batchgen.bench.simulate import main as simulate_main

    raise typer.Exit(simulate_main(context.args))


def main() -> None:
    """Entry point of the `batchgen` command: an expected error is one line on stderr and its documented exit code."""
    prepare_environment()
    from batchgen.signals import ignore_signals

    try:
        app(prog_name="batchgen")
    except (BatchgenError, Interrupted) as error:
        ignore_signals()
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(f"batchgen: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        print(
            f"batchgen: unexpected {what}; what was committed is safe. Please report this with the output of "
            "batchgen --debug ...",
            file=sys.stderr,
        )
        sys.exit(1)
