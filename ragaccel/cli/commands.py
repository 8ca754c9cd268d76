"""The commands: the arguments and the flow of each.

Nothing heavy is imported at the top, so that ``ragaccel --help`` stays quick.
"""

import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ragaccel.cli import settings as options
from ragaccel.cli.settings import KEYS, describe_setting, make_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ragaccel.cli.ask import ChatSession
    from ragaccel.cli.doctor import Check
    from ragaccel.cli.history import Turn
    from ragaccel.cli.index import Source
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.terminal import ExitCode, Terminal
    from ragaccel.llm import LLM
    from ragaccel.passage import Passage


def ask(
    terminal: "Terminal",
    target: options.Target = None,
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="QUESTION", help="The question; without it, stdin is read.", show_default=False
        ),
    ] = None,
    index: options.Index = None,
    *,
    settings: "Settings",
    compare: options.Compare = False,
    show_sources: options.ShowSources = False,
    stats: options.ShowStats = False,
    json: options.Json = False,
    plain: options.Plain = False,
    no_stream: options.NoStream = False,
    no_accel: options.NoAccel = False,
    resume: options.Continue = False,
) -> "ExitCode":
    """Index what is new in a folder, then answer a question from it.

    If a question is given, text from stdin is used as context beside the documents.

    If they do not answer the question, the nearest passages are shown and the exit code is 5.
    """
    from ragaccel.cli.ask import OutputOptions, open_session, read_question
    from ragaccel.cli.terminal import ExitCode, UsageError

    if compare and no_accel:
        raise UsageError("--compare already measures against --no-accel: give only one of the two")
    asked = read_question(terminal, target, question, index)
    output = OutputOptions(json, not no_stream, plain, show_sources, stats, compare, not no_accel)
    with open_session(terminal, asked.source, settings, output=output, resume=resume) as session:
        answer = session.ask(asked.text, asked.context)
    return ExitCode.OK if answer.answered else ExitCode.NOT_ANSWERED


_HELP = """\
/sources  list every passage that the model read for the last answer
/new      start a new conversation
/quit     leave (Ctrl-D does, too)"""


def chat(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    *,
    settings: "Settings",
    show_sources: options.ShowSources = False,
    stats: options.ShowStats = False,
    no_accel: options.NoAccel = False,
    resume: options.Continue = False,
) -> "ExitCode":
    """Ask one question after the other.

    Questions may refer to earlier ones, and with --continue to those of the last conversation.

    Questions are read from the terminal, or from a pipe, one a line. With a pipe the exit code is
    5 if the documents do not answer one of them.
    """
    from ragaccel.cli.ask import OutputOptions, open_session
    from ragaccel.cli.index import resolve_source
    from ragaccel.cli.terminal import ExitCode

    source = resolve_source(target, index)
    output = OutputOptions(show_sources=show_sources, show_stats=stats, accelerate=not no_accel)
    codes = [ExitCode.OK]
    with open_session(terminal, source, settings, output=output, resume=resume) as session:
        if sys.stdin.isatty():
            terminal.note("type a question, /help, or Ctrl-D to leave")
        while (line := _read_line(terminal)) not in (None, "/quit", "/exit"):
            if line and line.startswith("/"):
                _command(terminal, session, line)
            elif line:
                codes.append(_answer(terminal, session, line))
    if sys.stdin.isatty():
        return ExitCode.OK
    # a failure outranks a question that was not answered
    return max(codes, key=lambda code: 0.5 if code == ExitCode.NOT_ANSWERED else code)


def _read_line(terminal: "Terminal") -> str | None:
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline().decode("utf-8", "replace")
        return line.strip() if line else None
    with suppress(ImportError):
        import readline  # noqa: F401  (adds line editing and history to input())
    try:
        return terminal.err.input("\n[bold]> [/]").strip()
    except EOFError:
        terminal.note("")
        return None


def _answer(terminal: "Terminal", session: "ChatSession", question: str) -> "ExitCode":
    """Answer one question of a chat; an error or Ctrl-C ends this answer only."""
    from ragaccel.cli.terminal import ExitCode, exit_code_of, explain
    from ragaccel.errors import RagaccelError

    try:
        answer = session.ask(question)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        terminal.note("interrupted")
        return ExitCode.INTERRUPTED
    except RagaccelError as error:
        terminal.fail(explain(error))
        return exit_code_of(error)
    return ExitCode.OK if answer.answered else ExitCode.NOT_ANSWERED


def _command(terminal: "Terminal", session: "ChatSession", line: str) -> None:
    from ragaccel.cli.answer_view import show_sources

    if line == "/new":
        session.conversation.start_over()
        terminal.note("a new conversation begins")
    elif line == "/sources" and session.last is not None:
        show_sources(terminal, session.last, everything=True)
    elif line == "/sources":
        terminal.note("nothing was asked yet")
    else:
        terminal.note(_HELP)


def search(
    terminal: "Terminal",
    target: options.Target = None,
    query: Annotated[
        str | None,
        typer.Argument(metavar="QUERY", help="The text to search for; without it, stdin is read."),
    ] = None,
    index: options.Index = None,
    mode: Annotated[
        Literal["fused", "dense", "text"],
        typer.Option(help="Rank by meaning and words, by meaning, or by words (BM25)."),
    ] = "fused",
    full: Annotated[
        bool, typer.Option("--full", help="Print whole passages, not only their start.")
    ] = False,
    json: options.Json = False,
    *,
    settings: "Settings",
) -> "ExitCode":
    """Find passages and show their scores, without a language model.

    What is new in the folder is indexed first.
    """
    from ragaccel.cli.answer_view import passage_json
    from ragaccel.cli.ask import read_question
    from ragaccel.cli.index import open_index
    from ragaccel.cli.terminal import ExitCode
    from ragaccel.errors import EmptyIndexError

    asked = read_question(terminal, target, query, index, subcommand="search")
    with open_index(terminal, asked.source, settings) as opened:
        passages = opened.retriever.search(asked.text, settings.k, mode=mode)
    if json:
        terminal.json(
            {
                "query": asked.text,
                "mode": mode,
                "passages": [passage_json(passage) for passage in passages],
            }
        )
    if not passages:
        raise EmptyIndexError(f"no passage of {asked.source.name} matches the query")
    if not json:
        for number, passage in enumerate(passages, start=1):
            _show_passage(terminal, number, passage, full=full)
    return ExitCode.OK


def _show_passage(terminal: "Terminal", number: int, passage: "Passage", *, full: bool) -> None:
    from rich.text import Text

    from ragaccel.cli.answer_view import excerpt, source_line
    from ragaccel.cli.terminal import printable

    terminal.write(source_line(terminal, number, passage, score=True), end="\n")
    body = printable(passage.text) + "\n" if full else excerpt(passage, terminal.wrap_width)
    terminal.write(Text(body), end="\n")


def index(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build the index anew.")] = False,
    passages: Annotated[
        Path | None,
        typer.Option(
            "--passages",
            metavar="FILE",
            help="Index ready-made passages: TSV `id<TAB>text` or JSONL {id, title, text}.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1, not 4, if a file cannot be read.")
    ] = False,
    json: options.Json = False,
    *,
    settings: "Settings",
) -> "ExitCode":
    """Index the documents of a folder.

    New and changed files are read, unchanged ones skipped and deleted ones dropped. Links that lead
    out of the folder are skipped. A rebuilt index replaces the old one only when it is
    complete.
    """
    from ragaccel.cli.index import (
        index_source,
        print_report,
        report_json,
        resolve_collection,
        resolve_source,
    )
    from ragaccel.cli.terminal import ExitCode, UsageError

    if passages is not None and target is not None:
        raise UsageError("give DIR or --passages FILE, not both")
    source = resolve_collection(passages, index) if passages else resolve_source(target, index)
    report = index_source(
        terminal,
        source,
        settings,
        include=include or (),
        exclude=exclude or (),
        rebuild=rebuild,
    )
    if json:
        terminal.json(report_json(source, report))
    else:
        print_report(terminal, source, report, always=True)
    if not report.failed:
        return ExitCode.OK
    return ExitCode.FAILED if strict else ExitCode.PARTIAL


_NO_PATH = "(of no document)"  # stands for passages that a program added without a path


def ls(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    failed: Annotated[
        bool,
        typer.Option("--failed", help="List files that could not be read or were skipped."),
    ] = False,
    json: options.Json = False,
) -> "ExitCode":
    """List the files of an index and how many passages each has.

    --failed lists other files instead, each with the reason: files that could not be read, whose
    encoding is uncertain, or that are not documents.
    """
    from rich.text import Text

    from ragaccel.cli.answer_view import is_name
    from ragaccel.cli.index import (
        count_unread,
        files_json,
        list_unread,
        one_line,
        open_store,
        resolve_source,
        unread_json,
    )
    from ragaccel.cli.terminal import ExitCode

    source = resolve_source(target, index)
    with open_store(source) as store:
        if json:
            terminal.json(unread_json(store) if failed else files_json(store))
            return ExitCode.OK
        if failed:
            list_unread(terminal, store)
            return ExitCode.OK
        records = list(store.files().values())
        num_failed, num_skipped = count_unread(store)
    for record in records:
        if record.status != "indexed":
            continue
        line = Text(f"{record.num_passages:7,}  ", style="dim").append(
            one_line(record.path or _NO_PATH)
        )
        if record.title and not is_name(record.title, record.path):
            line.append(f"  {one_line(record.title)}", style="dim")
        terminal.write(line, end="\n")
    if num_failed or num_skipped:
        counts = f"{num_failed:,} files could not be read, {num_skipped:,} were skipped"
        terminal.note(f"{counts}: `{source.command('ls', '--failed')}` lists them")
    return ExitCode.OK


def rm(
    terminal: "Terminal",
    target: options.Target = None,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE", help="Files as `ls` shows them, or glob patterns.", show_default=False
        ),
    ] = None,
    index: options.Index = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete the whole index; the documents stay.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let removed files be indexed again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> "ExitCode":
    """Remove files from an index; the files themselves stay.

    Removed files stay out of the index, also of a rebuilt one, until `rm --undo` names them.
    """
    from pathlib import Path

    from ragaccel.cli.index import resolve_source
    from ragaccel.cli.terminal import ExitCode, UsageError

    if index is not None and target is not None and not Path(target).expanduser().is_dir():
        files, target = [target, *(files or [])], None
    source = resolve_source(target, index)
    if everything == bool(files):
        raise UsageError("name the files to remove, or give --all to delete the whole index")
    if undo and not files:
        raise UsageError("--undo needs the names of files: those to be indexed again")
    if files:
        return (_restore_files if undo else _exclude_files)(terminal, source, files)
    if not (yes or _confirms(terminal, source)):
        raise UsageError("nothing was deleted: confirm with y in a terminal, or give --yes")
    _delete(source)
    terminal.note(f"deleted {source.index}; the documents are unchanged")
    return ExitCode.OK


def _exclude_files(terminal: "Terminal", source: "Source", patterns: "Sequence[str]") -> "ExitCode":
    from ragaccel.cli.index import open_store
    from ragaccel.cli.terminal import ExitCode

    with open_store(source) as store, store.writing():
        known = store.files()
        chosen = [path for pattern in patterns for path in _matching(pattern, known)]
        store.leave_out([path for path in chosen if known[path].kind == "document"])
        num_removed = store.remove(dict.fromkeys(chosen))
    unknown = [pattern for pattern in patterns if not _matching(pattern, known)]
    for pattern in unknown:
        terminal.fail(f"no file {pattern!r} in the index: `{source.command('ls')}` lists its files")
    terminal.note(f"removed {_count_files(num_removed)} from the index")
    return ExitCode.FAILED if unknown else ExitCode.OK


def _restore_files(terminal: "Terminal", source: "Source", patterns: "Sequence[str]") -> "ExitCode":
    from ragaccel.cli.index import open_store
    from ragaccel.cli.terminal import ExitCode

    with open_store(source) as store, store.writing():
        left_out = store.left_out()
        chosen = [path for path in left_out if any(_matching(p, [path]) for p in patterns)]
        store.leave_out(chosen, undo=True)
    unknown = [pattern for pattern in patterns if not _matching(pattern, left_out)]
    for pattern in unknown:
        terminal.fail(
            f"{pattern!r} was not removed: `{source.command('stats')}` lists the removed files"
        )
    terminal.note(f"`{source.index_command()}` will index {_count_files(len(chosen))} again")
    return ExitCode.FAILED if unknown else ExitCode.OK


def _count_files(number: int) -> str:
    return "1 file" if number == 1 else f"{number:,} files"


def _matching(pattern: str, paths: "Iterable[str]") -> list[str]:
    from fnmatch import fnmatchcase

    return [path for path in paths if path == pattern or fnmatchcase(path, pattern)]


def _confirms(terminal: "Terminal", source: "Source") -> bool:
    if not sys.stdin.isatty():
        return False
    answer = terminal.err.input(f"delete {source.index}? y/n ", markup=False)
    return answer.strip().lower() in ("y", "yes")


def _delete(source: "Source") -> None:
    from ragaccel.errors import EmptyIndexError
    from ragaccel.retrieval.store import Store

    if not source.index.exists():
        raise EmptyIndexError(f"there is no index at {source.index}")
    Store(source.index).discard()


def stats(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    json: options.Json = False,
) -> "ExitCode":
    """Show how large an index is and what it was made from."""
    from rich.table import Table

    from ragaccel.cli.index import index_stats, open_store, resolve_source
    from ragaccel.cli.terminal import ExitCode

    source = resolve_source(target, index)
    with open_store(source) as store:
        values = index_stats(store)
    if json:
        terminal.json(values)
        return ExitCode.OK
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    terminal.show(table)
    return ExitCode.OK


_MAX_SQLITE_INTEGER = 2**63 - 1  # larger numbers overflow a column


def logs(
    terminal: "Terminal",
    limit: Annotated[
        int,
        typer.Option("-n", min=1, max=_MAX_SQLITE_INTEGER, help="How many of the latest to show."),
    ] = 5,
    containing: Annotated[
        str, typer.Option("--containing", metavar="TEXT", help="Show only those that contain TEXT.")
    ] = "",
    conversation: Annotated[
        int | None,
        typer.Option(
            "--conversation",
            metavar="N",
            min=1,
            max=_MAX_SQLITE_INTEGER,
            help="Show only conversation N.",
        ),
    ] = None,
    path: Annotated[
        bool, typer.Option("--path", help="Print the path of the history file.")
    ] = False,
    json: options.Json = False,
) -> "ExitCode":
    """Show past questions and answers, the latest last."""
    from ragaccel.cli.history import History, default_history_path
    from ragaccel.cli.terminal import ExitCode

    if path:
        terminal.write(str(default_history_path()), end="\n")
        return ExitCode.OK
    history = History()
    try:
        turns = history.recent(limit, containing, conversation)[::-1]
    finally:
        history.close()
    if json:
        terminal.json([_turn_json(turn) for turn in turns])
    elif not turns:
        terminal.note(
            "nothing was asked yet"
            if not containing
            else f"no question or answer contains {containing!r}"
        )
    for turn in turns if not json else ():
        _show_log(terminal, turn)
    return ExitCode.OK


def _show_log(terminal: "Terminal", turn: "Turn") -> None:
    from rich.text import Text

    from ragaccel.cli.terminal import printable

    when = datetime.fromtimestamp(turn.asked).strftime("%Y-%m-%d %H:%M")
    head = f"#{turn.turn_id}  {when}  {turn.source}  conversation {turn.conversation}"
    terminal.write(Text(printable(head), style="dim"), end="\n")
    terminal.write(Text(printable(turn.question), style="bold"), end="\n")
    terminal.write(printable(turn.answer), end="\n" if turn.answer else "")
    if turn.state != "answered":
        terminal.write(Text(f"({turn.state})", style="yellow"), end="\n")
    for source in turn.details.get("sources", ()):
        if source.get("used"):
            line = f"  {source['number']} {source['citation']}"
            terminal.write(Text(printable(line), style="dim"), end="\n")
    terminal.write("\n")


def _turn_json(turn: "Turn") -> dict[str, object]:
    return {
        "id": turn.turn_id,
        "conversation": turn.conversation,
        "source": turn.source,
        "asked": datetime.fromtimestamp(turn.asked).astimezone().isoformat(timespec="seconds"),
        "question": turn.question,
        "answer": turn.answer,
        "state": turn.state,
        "model": turn.model,
        **turn.details,
    }


_MARKS = {
    "ok": ("✓", "ok", "green"),
    "missing": ("–", "--", "yellow"),
    "broken": ("✗", "!!", "red"),
}


def doctor(
    terminal: "Terminal",
    target: options.Target = None,
    index: options.Index = None,
    load: Annotated[
        bool,
        typer.Option("--load", help="Load the language model and check that it decodes exactly."),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure how long this machine takes to verify drafts; keep it."
        ),
    ] = False,
    json: options.Json = False,
    *,
    settings: "Settings",
) -> "ExitCode":
    """Check the installation.

    Checks versions, extras, device and models, and the index of DIR if one is given.
    """
    if measure:
        from ragaccel.cli.doctor import measure_latency

        return measure_latency(terminal, settings, json=json)
    from dataclasses import asdict

    from ragaccel.cli.index import resolve_source
    from ragaccel.cli.terminal import ExitCode

    source = resolve_source(target, index) if target or index else None
    checks = []
    for check in _all_checks(terminal, settings, source, load=load):
        checks.append(check)
        if not json:
            _show_checks(terminal, check)
    if json:
        terminal.json([asdict(check) for check in checks])
    broken = [check for check in checks if check.state == "broken"]
    if broken:
        terminal.fail(f"{len(broken)} of {len(checks)} checks failed")
    return ExitCode.FAILED if broken else ExitCode.OK


def _all_checks(
    terminal: "Terminal", settings: "Settings", source: "Source | None", *, load: bool
) -> "Iterator[Check]":
    from ragaccel.cli import doctor as checks
    from ragaccel.cli.ask import load_llm
    from ragaccel.cli.index import check_index

    yield from checks.installation()
    yield from checks.machine()
    yield from checks.data_folder()
    yield from checks.models(settings)
    if load:
        yield checks.run_check(
            "model loading", lambda: _describe_model(load_llm(terminal, settings))
        )
    if source is not None:
        found = source
        yield checks.run_check("index", lambda: check_index(found, settings))


def _describe_model(llm: "LLM") -> str:
    limit = llm.context_length
    context = "any number of" if limit is None else f"{limit:,}"
    return f"decodes exactly (self-check passed), {context} tokens of context"


def _show_checks(terminal: "Terminal", check: "Check") -> None:
    from rich.text import Text

    mark, plain, style = _MARKS[check.state]
    line = Text().append(mark if terminal.unicode else plain, style=style)
    line.append(f" {check.name}", style="bold").append(f"  {check.detail}")
    terminal.write(line, end="\n")
    if check.state != "ok" and check.remedy:
        terminal.write(Text(f"    {check.remedy}", style="dim"), end="\n")


config = typer.Typer(
    help="Show the settings.\n\nThe first of these that gives a setting counts: its option, its"
    " RAGACCEL_* variable, ragaccel.toml in the current folder, the user's own ragaccel.toml, its"
    " default. The file in the current folder may only give k, max_tokens, temperature, seed and"
    " color.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def show(terminal: "Terminal", json: options.Json = False, *, settings: "Settings") -> "ExitCode":
    """Show every setting, its value and where the value comes from."""
    from rich.table import Table

    from ragaccel.cli.terminal import ExitCode
    from ragaccel.paths import user_settings_file

    values, origins = asdict(settings), settings.origins
    if json:
        terminal.json({key: {"value": values[key], "from": origins[key]} for key in KEYS})
        return ExitCode.OK
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("setting", "value", "from", "what it is"):
        table.add_column(heading, overflow="fold")
    for key in KEYS:
        table.add_row(key, _format_value(values[key]), origins[key], describe_setting(key))
    terminal.show(table)
    path = user_settings_file()
    terminal.note(f"settings file: {path}" + ("" if path.exists() else " (there is none yet)"))
    return ExitCode.OK


def _format_value(value: object) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


@config.callback()
def _config_group() -> None:
    """Make ``show`` a subcommand: Typer runs a single command without its name."""


config.command("show")(make_command(show, *KEYS))


Samples = Annotated[
    Path,
    typer.Argument(
        metavar="SAMPLES",
        help="Samples as JSON lines: {prompt, answer}, {messages} or {prompt_ids, answer_ids}.",
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write the result to.")]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper",
        help="Train all weights, as the paper does, which changes the model's answers; else an"
        " adapter is trained, which leaves them as they are.",
    ),
]
Masks = Annotated[
    int | None, typer.Option(metavar="K", help="Mask tokens: tokens predicted ahead. [5]")
]
Rank = Annotated[int | None, typer.Option(metavar="R", help="Rank of the adapter's weights. [32]")]
LearningRate = Annotated[
    float | None,
    typer.Option(metavar="RATE", help="Peak learning rate. [0.002; with --paper 0.00005]"),
]
Steps = Annotated[
    int | None, typer.Option(metavar="N", help="Optimizer steps, in place of --epochs.")
]
Epochs = Annotated[
    int | None, typer.Option(metavar="N", help="Times that all samples are seen. [2]")
]
RowTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Maximum tokens of a packed row. [2048]")
]
Accumulate = Annotated[
    int | None, typer.Option(metavar="N", help="Rows of a step, on each device. [1]")
]
Precision = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Compute in float32 or bfloat16. [float32]")
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Seed of initial weights and sample order. [0]")
]
EvaluateEvery = Annotated[
    int | None, typer.Option(metavar="STEPS", help="Also evaluate every STEPS steps.")
]
SaveEvery = Annotated[
    int | None, typer.Option(metavar="STEPS", help="Steps between checkpoints. [100]")
]
HeldOut = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Samples to evaluate on. [one in 20 of SAMPLES]")
]
EvaluateOn = Annotated[
    int, typer.Option(metavar="N", help="Maximum number of samples to evaluate on.")
]
OwnAnswers = Annotated[
    bool,
    typer.Option(
        "--own-answers", help="Train on answers that the model first writes to the prompts."
    ),
]
AnswerTokens = Annotated[
    int, typer.Option(metavar="N", help="Maximum length of those answers, in tokens.")
]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="cpu: use no GPU. [all visible GPUs, else the CPU]"),
]
Run = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Folder of checkpoints. [DIR-run]")
]


train = typer.Typer(
    help="Train an adapter that makes answers faster.", no_args_is_help=True, rich_markup_mode=None
)


def space(
    terminal: "Terminal",
    samples: Samples,
    out: Out,
    model: options.Model = None,
    paper: Paper = False,
    masks: Masks = None,
    rank: Rank = None,
    learning_rate: LearningRate = None,
    steps: Steps = None,
    epochs: Epochs = None,
    row_tokens: RowTokens = None,
    accumulate: Accumulate = None,
    precision: Precision = None,
    seed: Seed = None,
    evaluate_every: EvaluateEvery = None,
    save_every: SaveEvery = None,
    held_out: HeldOut = None,
    evaluate_on: EvaluateOn = 200,
    own_answers: OwnAnswers = False,
    answer_tokens: AnswerTokens = 256,
    device: Device = None,
    run: Run = None,
    json: options.Json = False,
) -> "ExitCode":
    """Train a SPACE adapter, with which a model drafts its own next tokens.

    After an interruption the same command goes on where it stopped. For several GPUs: torchrun
    --nproc-per-node N -m ragaccel train space …
    """
    from ragaccel.cli.train import run_training
    from ragaccel.training.config import make_recipe
    from ragaccel.training.trainer import Job

    recipe = make_recipe(
        "paper" if paper else "gated",
        num_masks=masks,
        rank=rank,
        learning_rate=learning_rate,
        steps=steps,
        epochs=epochs,
        row_tokens=row_tokens,
        accumulate=accumulate,
        precision=precision,
        seed=seed,
        evaluate_every=evaluate_every,
        save_every=save_every,
    )
    job = Job(
        samples,
        out,
        model=model,
        held_out=held_out,
        max_evaluated=evaluate_on,
        own_answers=own_answers,
        answer_tokens=answer_tokens,
        device=device,
        run_folder=run,
    )
    return run_training(terminal, job, recipe, as_json=json)


@train.callback()
def _train_group() -> None:
    """Make ``space`` a subcommand: Typer runs a single command without its name."""


train.command("space")(make_command(space))
