"""The command line: ``rope-fusion demo | list | explain | dump | diff | bench | options``.

Whatever a user gets wrong ends in one sentence on standard error and exit status 2.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from rope_fusion.options import PREFIX, RopeFusionOptionError, describe, parse

if TYPE_CHECKING:
    import torch


class UsageError(Exception):
    """Something that the user can put right; its text is the sentence to print."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        parser, commands = _parser()
        _check_command(arguments, commands)
        chosen = parser.parse_args(arguments)
        status = chosen.run(chosen)
        sys.stdout.flush()
        return status
    except (UsageError, RopeFusionOptionError) as problem:
        print(f"rope-fusion: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (`head`, `less`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("rope-fusion: interrupted", file=sys.stderr)
        return 130


def _check_command(arguments: Sequence[str], commands: Sequence[str]) -> None:
    first = arguments[0] if arguments else None
    if first is not None and not first.startswith("-") and first not in commands:
        near = difflib.get_close_matches(first, commands, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands are: {', '.join(commands)}"
        raise UsageError(f"there is no command {first!r}; {hint}")


def _parser() -> tuple[_Parser, list[str]]:
    parser = _Parser(
        prog="rope-fusion",
        description="Fuses rotary embeddings, FP8 quantisation and KV-cache writes in torch.compile.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    demo = add("demo", _demo, "Compile three small models with and without rope_fusion and compare them.")
    demo.add_argument("--dump", metavar="DIR", help="where graphs before and after the pass go (default: a new folder)")
    listing = add("list", _list, "List the patterns, and which of them may run here.")
    listing.add_argument("--device", help="the device to ask about (default: cuda where there is one, else cpu)")
    explain = add("explain", _explain, "Compile a model and say what was fused, and why the rest was not.")
    dump = add("dump", _dump, "Compile a model and write its graphs before and after the pass.")
    for command in (explain, dump):
        command.add_argument(
            "target",
            metavar="MODULE:FUNCTION",
            help="a function of no arguments, in a module or a .py file, that returns (model, args) or "
            "(model, args, kwargs)",
        )
        command.add_argument(
            "-o",
            "--option",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="an option as for torch.compile, for example rope_fusion.kernels=reference",
        )
        command.add_argument("--traceback", action="store_true", help="show where a failing model failed")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    dump.add_argument("directory", metavar="DIR", help="the folder to write into")
    compare = add(
        "diff", _diff, "Compare two graph texts, whatever the numbers in their names; status 1 if they differ."
    )
    compare.add_argument("a", metavar="A", help="a text file, or a folder that `rope-fusion dump` wrote")
    compare.add_argument("b", metavar="B", help="likewise")
    bench = add("bench", _bench, "Measure kernels, cache writes, whole models and compilation.")
    bench.add_argument(
        "names", nargs="*", metavar="NAME", help="which measurements (default: all that suit the device)"
    )
    bench.add_argument("--device", help="where to measure (default: cuda where there is one, else cpu)")
    bench.add_argument("--quick", action="store_true", help="fewer sizes")
    bench.add_argument("--list", action="store_true", help="list the measurements and stop")
    bench.add_argument(
        "--json",
        nargs="?",
        const="",
        metavar="PATH",
        help="write the figures as JSON to this file too, or print them instead of tables (give names before it)",
    )
    add("options", _options, "Print every rope_fusion.* option.")
    return parser, list(commands.choices)


def _demo(chosen: argparse.Namespace) -> int:
    from rope_fusion import demo

    return demo.main(_writable(chosen.dump) if chosen.dump else None)


def _list(chosen: argparse.Namespace) -> int:
    import torch
    from tabulate import tabulate

    from rope_fusion.capability import GateContext
    from rope_fusion.catalog import PatternError, load_patterns

    device = _device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        entries = load_patterns()
    except PatternError as problem:
        raise UsageError(str(problem)) from problem
    verdicts = {entry.name: entry.verdict(GateContext(device)) for entry in entries}
    rows = [
        (
            entry.name,
            entry.priority,
            "closed" if verdicts[entry.name] else "open",
            textwrap.fill(entry.summary, 56),
            entry.origin,
        )
        for entry in entries
    ]
    print(tabulate(rows, ("pattern", "priority", f"gate on {device}", "summary", "from")))
    for sentence in dict.fromkeys(verdict for verdict in verdicts.values() if verdict):
        names = ", ".join(name for name, verdict in verdicts.items() if verdict == sentence)
        print(textwrap.fill(f"{names}: {sentence}", 100, initial_indent="\n", subsequent_indent="  "))
    return 0


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"there is no device type {name!r}; use for example cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA or ROCm device on this machine; leave --device out, or use --device cpu")
    return device


def _explain(chosen: argparse.Namespace) -> int:
    from rope_fusion.report import Report

    report = Report()
    _compile(chosen, {f"{PREFIX}report": report})
    print(report.to_json() if chosen.json else report.table())
    return 0


def _dump(chosen: argparse.Namespace) -> int:
    from rope_fusion.report import Report

    directory = _writable(chosen.directory)
    report = Report()
    _compile(chosen, {f"{PREFIX}report": report, f"{PREFIX}dump_dir": str(directory)})
    for graph in report.graphs:
        print(graph.dump)
    if not report.graphs:
        raise UsageError(f"{chosen.target} compiled no graph, so there is nothing to write")
    return 0


def _compile(chosen: argparse.Namespace, options: dict[str, Any]) -> None:
    """Compile what the target function returns and call it once."""
    options = {**_options_of(chosen.option), **options}
    parse(options)  # a wrong option is reported before the model is built
    made = _call(chosen, _factory(chosen.target))
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise UsageError(
            f"{chosen.target} must return (model, args) or (model, args, kwargs), got {type(made).__name__}"
        )
    model, args, kwargs = (*made, {}) if len(made) == 2 else made

    import torch

    from rope_fusion.backend import rope_fusion

    def run() -> None:
        with torch.no_grad():
            torch.compile(model, backend=rope_fusion, options=options)(*args, **kwargs)

    _call(chosen, run)


def _call(chosen: argparse.Namespace, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        if chosen.traceback:
            raise
        first = (str(error).strip() or "no message").splitlines()[0]
        raise UsageError(
            f"{chosen.target} failed with {type(error).__name__}: {first} (--traceback shows where)"
        ) from error


def _factory(target: str) -> Callable[[], Any]:
    name, colon, attribute = target.rpartition(":")
    if not colon or not name or not attribute:
        raise UsageError(f"write the target as MODULE:FUNCTION or FILE.py:FUNCTION, got {target!r}")
    try:
        module = _load(name)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name!r} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        near = difflib.get_close_matches(attribute, [key for key in vars(module) if not key.startswith("_")], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{name!r} has no function {attribute!r}{hint}")
    return found


def _load(name: str) -> ModuleType:
    if not name.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` does: modules of the current folder
        return importlib.import_module(name)
    if not Path(name).is_file():
        raise UsageError(f"there is no file {name!r}")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _options_of(assignments: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise UsageError(f"write an option as KEY=VALUE, got {assignment!r}")
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text
    return options


def _writable(directory: str) -> Path:
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot make the folder {directory!r}: {getattr(error, 'strerror', error)}") from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"cannot write into {directory!r}")
    return path


def _diff(chosen: argparse.Namespace) -> int:
    from rope_fusion.graph_text import diff

    difference = diff(_graph_text(chosen.a), _graph_text(chosen.b), chosen.a, chosen.b)
    sys.stdout.write(difference)
    return 1 if difference else 0


def _graph_text(name: str) -> str:
    from rope_fusion.graph_text import AFTER

    path = Path(name)
    try:
        text = (path / AFTER if path.is_dir() else path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"cannot read a graph from {name!r}: {reason}") from error
    if "return " not in text:
        raise UsageError(f"there is no graph in {name!r}; write one with: rope-fusion dump MODULE:FUNCTION DIR")
    return text


def _bench(chosen: argparse.Namespace) -> int:
    from rope_fusion import bench

    names = bench.names()
    if chosen.list:
        print("\n".join(names))
        return 0
    for name in chosen.names:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
            raise UsageError(f"there is no measurement {name!r}; {hint}")
    if chosen.json in names:
        raise UsageError(f"--json takes a file, got the measurement {chosen.json!r}; give names before it")
    device = str(_device(chosen.device or bench.default_device()))
    file = _new_file(chosen.json) if chosen.json else None
    return _run_bench(chosen, device, file)


def _run_bench(chosen: argparse.Namespace, device: str, file: Path | None) -> int:
    """Print each result when it is there; the file is written anew each time, so that a run cut short leaves what it had."""
    from rope_fusion import bench

    tables = chosen.json != ""
    if tables:
        print(bench.machine(device).sentence() + "\n", flush=True)
    results = []
    for result in bench.run(chosen.names, device, chosen.quick):
        results.append(result)
        if tables:
            print(result.text(), flush=True)
        if file is not None:
            file.write_text(json.dumps(bench.as_dict(device, results), indent=1) + "\n", encoding="utf-8")
    if not tables:
        print(json.dumps(bench.as_dict(device, results), indent=1))
    return 0 if all(result.good for result in results) else 1


def _new_file(name: str) -> Path:
    path = Path(name)
    try:
        path.write_text("")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {name!r}: {getattr(error, 'strerror', None) or error}") from error
    return path


def _options(chosen: argparse.Namespace) -> int:
    for name, takes, default, doc in describe():
        print(f"{name} = {default}    ({takes})")
        print(textwrap.fill(doc, 100, initial_indent="    ", subsequent_indent="    ") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
