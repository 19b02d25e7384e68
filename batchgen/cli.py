"""The command line: parse, call, print. Heavy imports only inside commands, so that --help, status and typos are quick."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

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
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="auto|I/N",
            help="Be worker I (from 0) of the N that share the job, in a folder that `batchgen prepare` has made; auto asks "
            "Slurm, SGE, PBS, AWS Batch or Kubernetes. Then: batchgen merge",
        ),
    ] = None,
) -> None:
    """Answer every row of a job; go on where an earlier run of it stopped."""
    if shard is not None and (restart or only is not None):
        raise UsageError("--shard goes with neither --restart nor --only, which concern the whole job; run that without it")
    if restart and only is not None:
        raise UsageError("--restart begins with no answers, --only goes on from those that are there; give one of them")
    from batchgen.cluster.caches import own_caches
    from batchgen.cluster.requeue import requeue
    from batchgen.signals import StopSignals, ignore_signals

    with own_caches() if shard else contextlib.nullcontext(), StopSignals(last=True) as stop:
        with stop.deferred():  # an import that breaks off leaves half a module; this one takes seconds
            from batchgen.job import load_job

            job = load_job(job_file, overrides or [])
            from batchgen.data.rerun import read_choice

            choice = None if only is None else read_choice(only)
            from batchgen.cluster.environment import find_task, parse_shard
            from batchgen.cluster.worker import run_shard
            from batchgen.runner import run_job

            task = shard and (find_task(os.environ) if shard == "auto" else parse_shard(shard))
        try:
            code = run_shard(job, task) if task else run_job(job, restart=restart, only=choice)
        except Interrupted as interrupted:
            ignore_signals()
            raise requeue(interrupted, os.environ) from None
    raise typer.Exit(code)


@app.command()
def prepare(
    job_file: JobFile,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="How many workers will share the job, about")] = 1,
) -> None:
    """Make a job ready for workers that share it (run --shard): fetch, tokenize and plan once. Needs no GPU."""
    from batchgen.signals import StopSignals

    with StopSignals(last=True) as stop:
        with stop.deferred():
            from batchgen.job import load_job

            job = load_job(job_file, overrides or [])
            from batchgen.cluster.prepare import prepare_job
        words = shlex.join([str(job_file), *(word for one in overrides or [] for word in ("--set", one))])
        for line in prepare_job(job, tasks, words):
            print(line)


@app.command()
def plan(
    job_file: JobFile,
    overrides: Overrides = None,
    reorder_fields: Annotated[
        bool, typer.Option("--reorder-fields", help="Say what another order of the template's paragraphs would save")
    ] = False,
) -> None:
    """Show what a job would do: rows that would fail, lengths, duplicates, prefix savings, memory. Loads no weights."""
    from batchgen.job import load_job

    job = load_job(job_file, overrides or [])
    from batchgen.planner import plan_job

    for line in plan_job(job, reorder_fields):
        print(line)


@app.command()
def status(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="As one JSON object")] = False) -> None:
    """Show how far a run is, while it works or after."""
    from batchgen.data.status import is_shared, read_status

    if is_shared(folder):
        from batchgen.cluster import status as cluster

        array = cluster.read_array_status(folder)
        print(json.dumps(cluster.as_json(array)) if as_json else "\n".join(cluster.array_lines(array)))
        return
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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit(
    context: typer.Context,
    job_file: JobFile,
    array: Annotated[str, typer.Option("--array", metavar="N[%M]", help="How many tasks, and how many of them at a time")],
    overrides: Overrides = None,
    show_only: Annotated[bool, typer.Option("--print", help="Show the scripts and submit nothing")] = False,
) -> None:
    """Share a job among the tasks of a Slurm array: submits three jobs, prepare, answer (the array) and merge. Any other
    option is sbatch's: batchgen submit JOB --array 8%4 -p gpu --gres=gpu:1 --time=4:00:00"""
    if str(job_file).startswith("-"):
        raise UsageError(f"{job_file}: the job file comes first: batchgen submit JOB --array {array} {job_file} ...")
    from batchgen.job import load_job

    job = load_job(job_file, overrides or [])
    from batchgen.cluster import submit as slurm

    slurm.check_job(job)
    folder = Path(job.output.path).absolute()
    scripts = slurm.write_scripts(
        job_file, overrides or [], folder, array, context.args, Path.cwd(), slurm.may_be_offline(job)
    )
    if show_only:
        for part, text in scripts._asdict().items():
            print(f"# ---- {folder}/submit/{part}.sh\n{text}")
        print("# ---- how they are submitted\n" + "\n".join(slurm.by_hand(folder)))
        return
    for part, number in slurm.submit(scripts, folder):
        print(f"{part} is job {number}: {folder}/submit/{part}.sh")
    print(f"logs in {folder}/logs; how far it is: batchgen status {shlex.quote(job.output.path)}")


@app.command()
def show(folder: Folder, rows: Annotated[int, typer.Option("-n", help="How many rows")] = 3, width: int = 100) -> None:
    """Print where the results of a run are, and their first rows."""
    from batchgen.data.show import first_rows

    for line in first_rows(folder, rows, width):
        print(line)


@app.command()
def merge(folder: Folder) -> None:
    """Write results/ of a run from its committed parts and those of its workers (`run` does it itself)."""
    from batchgen.report.progress import Progress
    from batchgen.runner import merge_again

    summary = merge_again(folder, Progress())
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: no locale is too poor for an answer
    from batchgen.signals import ignore_signals

    try:
        try:
            app(prog_name="batchgen")
        finally:
            sys.stdout.flush()
    except (BatchgenError, Interrupted) as error:
        ignore_signals()
        _end(str(error), error, error.exit_code)
    except BrokenPipeError:
        _end("", None, 1)
    except OSError as error:  # those of files are told where they are opened
        named = f"{error.filename}: " if error.filename else "standard output: cannot write: "
        _end(f"{named}{error.strerror or error}", error, 1)
    except Exception as error:
        what = (str(error).splitlines() or [""])[0]
        _end(
            f"unexpected {type(error).__name__}: {what}; what was committed is safe. Please report this with the output of "
            "batchgen --debug ...",
            error,
            1,
        )


def _end(said: str, error: BaseException | None, code: int) -> NoReturn:
    """Say it on stderr, with --debug after the traceback, and exit."""
    with contextlib.suppress(OSError):  # nobody reads it
        if error is not None and "--debug" in sys.argv:
            traceback.print_exception(error)
        if said:
            print(f"batchgen: {said}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter tries once more what standard output refused
    sys.exit(code)
