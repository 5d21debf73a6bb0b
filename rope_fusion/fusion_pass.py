"""The graph pass: canonicalise, match by priority, restore.

It runs as Inductor's `post_grad_custom_pre_pass`. A graph in which nothing is fused comes out node for node as it went
in, and so does one in which anything goes wrong (`rope_fusion.strict` raises instead).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from rope_fusion._torch import CustomGraphPass, auto_functionalized, detect_fake_mode, stable_topological_sort
from rope_fusion.bounds import check_indices
from rope_fusion.canonical.canonicalise import Canonicaliser, Findings, restore
from rope_fusion.canonical.emitter import Emitter
from rope_fusion.canonical.engine_ops import find_engine_ops
from rope_fusion.canonical.fp8 import find_fp8_quantisations
from rope_fusion.canonical.fp8_groups import find_group_quantisations
from rope_fusion.canonical.kv_cache import find_cache_writes
from rope_fusion.canonical.layer_writes import finish_layer_writes
from rope_fusion.canonical.layout import VIEW_TARGETS
from rope_fusion.canonical.operators import CANONICAL, rotary_qk
from rope_fusion.canonical.pair_views import separate_pair_views
from rope_fusion.canonical.rotary import explain_near_misses, find_rotations
from rope_fusion.capability import GateContext
from rope_fusion.catalog import CatalogEntry, load_patterns
from rope_fusion.engines import cache_providers
from rope_fusion.graph_text import dump_graphs, graph_to_text
from rope_fusion.matcher import PatternRunner
from rope_fusion.options import Options
from rope_fusion.report import GraphReport, publish
from rope_fusion.transaction import GraphTransaction
from rope_fusion.verify import SelfCheck

aten = torch.ops.aten


class FusionPass(CustomGraphPass):
    """Rewrites one post-grad graph in place and publishes what it did.

    Args:
        options: the user's choices.
        on_report: called with the finished report of each graph; by default it is published with Inductor's counters, so
            that caches store it with the graph.
    """

    def __init__(self, options: Options, on_report: Callable[[GraphReport], None] = publish) -> None:
        self.options = options
        self.self_check = SelfCheck(options) if options.verify != "off" else None
        self._on_report = on_report

    def __call__(self, graph: Graph) -> None:
        report = GraphReport()
        start = time.perf_counter()
        report.nodes_before = report.nodes_after = len(graph.nodes)
        dump = self.options.dump_dir
        before = graph_to_text(graph) if dump else ""
        transaction = GraphTransaction(graph)
        try:
            hits = self._rewrite(graph, report, transaction)
            if not hits:
                transaction.roll_back()
        except Exception as error:
            transaction.roll_back()
            for pattern in report.patterns.values():
                pattern.hits = 0
            sentence = f"the pass failed with {type(error).__name__}: {error}; the graph was compiled unfused"
            if self.options.strict:
                raise
            report.failure(sentence)  # whoever collects the report warns of it, from a warm cache too
        report.nodes_after = len(graph.nodes)
        report.pass_ms = (time.perf_counter() - start) * 1e3
        if dump:
            report.dump = str(dump_graphs(dump, report.name or "graph", before, graph_to_text(graph)))
        self._on_report(report)

    def _rewrite(self, graph: Graph, report: GraphReport, transaction: GraphTransaction) -> int:
        fake_mode = detect_fake_mode([node.meta["val"] for node in graph.nodes if "val" in node.meta])
        if fake_mode is None:
            return 0
        context = GateContext(_device_of(graph), self.options.kernels, self.options.numerics)
        entries = []
        for entry in load_patterns(self.options.disable):
            verdict = entry.verdict(context)
            report.gate(entry.name, verdict)
            if verdict is None:
                entries.append(entry)
        separate_pair_views(graph, Emitter(graph, fake_mode))
        engine = find_engine_ops(graph, fake_mode, self.options.numerics == "exact")
        rotations = find_rotations(graph)
        for sentence in explain_near_misses(graph, rotations):
            report.near_miss(sentence)
        group_quantisations, group_refusals, settled = find_group_quantisations(graph)
        quantisations, quant_refusals = find_fp8_quantisations(graph, settled)
        writes, write_refusals = find_cache_writes(graph, {*engine.written, *(write.node for write in engine.writes)})
        for sentence in (*engine.near_misses, *group_refusals, *quant_refusals, *write_refusals):
            report.near_miss(sentence)
        rotations, quantisations = rotations + engine.rotations, quantisations + engine.quantisations
        writes = writes + engine.writes
        report.rotations = len(rotations)
        if not entries or not (rotations or writes):
            return 0
        runners = [_runner(entry) for entry in entries]
        emitter = Emitter(graph, fake_mode)
        exact = self.options.numerics == "exact"
        originals = set(graph.nodes)
        hits = 0
        # What a pattern over rotations left is canonicalised anew for those without, as plain tensors.
        for over_rotations, group in itertools.groupby(runners, key=lambda runner: rotary_qk in runner.targets):
            findings = Findings(rotations, quantisations, writes, engine.layer_writes, group_quantisations)
            canonicaliser = Canonicaliser(graph, emitter, findings, exact)
            result = canonicaliser.run(rotations=over_rotations)
            for sentence in result.near_misses:
                if sentence not in report.near_misses:  # each round says the same of what it leaves
                    report.near_miss(sentence)
            stable_topological_sort(graph)
            hits += sum(runner.apply(graph, report, self.options.max_tokens) for runner in group)
            replaced = restore(graph, result, originals)
            stable_topological_sort(graph)  # a value given back may lie behind what reads it
            left = [node for node in graph.nodes if node.op == "call_function" and node.target in CANONICAL]
            if left:
                raise RuntimeError(f"the canonical operator {left[0].name} was neither fused nor restored")
            writes = [write for write in writes if write.node not in replaced and write.result not in replaced]
        if hits:
            finish_layer_writes(graph, emitter, {write.node.name: write for write in engine.layer_writes})
            engine.finish(graph)
            if self.self_check is not None:
                self.self_check.observe(graph, transaction)
            stable_topological_sort(graph)
            if self.options.check_bounds:
                check_indices(graph, emitter)
            live = _live(graph)
            _drop_unread_outputs(graph, fake_mode, live)
            _narrow_results(graph, fake_mode, live)
            engine.erase_replaced(graph)
            graph.eliminate_dead_code()  # last: an erased node cannot be brought back by a roll-back
        return hits

    def uuid(self) -> Any:
        """Everything that a compiled graph depends on through this pass; None keeps it out of caches."""
        if self.self_check is not None:
            return None  # a graph that comes from a cache was not seen, so it could not be checked
        if self.options.dump_dir is not None:
            return None  # nor written
        try:
            return _fingerprint(self.options)
        except Exception:  # a pattern that cannot be loaded, a gate that fails: the pass will say so when it runs
            return None


def _device_of(graph: Graph) -> torch.device:
    """The device that the graph computes on: the first accelerator found, else the CPU."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")


def _live(graph: Graph) -> set[Node]:
    """The nodes that something reads or that have an effect; the graph is sorted."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in live or node.is_impure():
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _prologue_operator(node: Node) -> Any:
    """The form of the fused prologue that a node calls, or None."""
    if node.op != "call_function":
        return None
    target = node.args[0] if node.target is auto_functionalized else node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.name.startswith("rope_fusion::rope_qkv"):
        return target
    return None


def _drop_unread_outputs(graph: Graph, fake_mode: Any, live: set[Node]) -> None:
    """The fused operator writes the rotated q and k only where somebody reads them."""
    for node in list(graph.nodes):
        if _prologue_operator(node) is None:
            continue
        read = {user.args[1] for user in node.users if user in live}
        values = list(node.meta["val"])
        for index, flag in enumerate(("need_q", "need_k")):
            if node.kwargs[flag] and index not in read:
                node.kwargs = {**node.kwargs, flag: False}
                with fake_mode, torch.no_grad():
                    values[index] = values[index].new_empty((0,))
        node.meta["val"] = tuple(values)


def _narrow_results(graph: Graph, fake_mode: Any, live: set[Node]) -> None:
    """The fused operator itself rounds what it returns, where all that its readers do with it first is to round it.

    It works in fp32 where the program quantises a rotated k it has not rounded, while q goes on in its own dtype.
    """
    for node in list(graph.nodes):
        if _prologue_operator(node) is not torch.ops.rope_fusion.rope_qkv.default:
            continue
        if node.kwargs["out_dtype"] != torch.float32:
            continue
        outputs = [user for user in node.users if user in live and user.args[1] in (0, 1)]
        q = node.kwargs["q"] if node.target is auto_functionalized else node.args[0]
        dtype = q.meta["val"].dtype
        if dtype == torch.float32 or not outputs:
            continue
        found = [chains for output in outputs if (chains := _only_rounded(output, dtype, live)) is not None]
        if len(found) < len(outputs):
            continue
        node.kwargs = {**node.kwargs, "result_dtype": dtype}
        values = list(node.meta["val"])
        with fake_mode, torch.no_grad():
            for index in (0, 1):
                values[index] = values[index].to(dtype)
            for view in itertools.chain.from_iterable(views for views, _ in found):
                view.meta["val"] = view.meta["val"].to(dtype)
        node.meta["val"] = tuple(values)
        for rounding in itertools.chain.from_iterable(roundings for _, roundings in found):
            rounding.replace_all_uses_with(rounding.all_input_nodes[0])
            graph.erase_node(rounding)


def _only_rounded(output: Node, dtype: torch.dtype, live: set[Node]) -> tuple[list[Node], list[Node]] | None:
    """The views through which `output` is read, itself included, and the conversions to `dtype` that are all they end in."""
    views, roundings, open_nodes = [], [], [output]
    while open_nodes:
        view = open_nodes.pop()
        views.append(view)
        for user in view.users:
            if user not in live:
                continue
            if user.target is torch.ops.prims.convert_element_type.default and user.args[1] == dtype:
                roundings.append(user)
            elif user.target in VIEW_TARGETS:
                open_nodes.append(user)
            else:
                return None
    return views, roundings


@functools.lru_cache(maxsize=64)
def _runner(entry: CatalogEntry) -> PatternRunner:
    """Patterns are traced when first needed: about 0.1 s each."""
    return PatternRunner(entry)


@functools.cache
def _files_digest(files: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _fingerprint(options: Options) -> str:
    root = Path(__file__).parent
    entries = load_patterns(options.disable)
    files = {str(path) for path in root.rglob("*.py")} | {entry.file for entry in entries if entry.file}
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    gates = {
        f"{entry.name}@{device}": entry.verdict(GateContext(device, options.kernels, options.numerics))
        for entry in entries
        for device in devices
    }
    state = {
        "files": _files_digest(tuple(sorted(files))),
        "patterns": [[entry.name, entry.priority, entry.origin] for entry in entries],
        "options": options.cache_key(),
        "gates": gates,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cache providers": cache_providers(),
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
