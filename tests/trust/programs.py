"""Random attention prologues as Python source: rotations, FP8 quantisations and cache writes in many spellings, right and slightly wrong.

A case is source text, so that a failure can be read, shortened and kept as a test.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trust.choices import Choices

ROWS = 24  # rows of a cos/sin table
BLOCKS, PAGE = 4, 5
CAPACITY = BLOCKS * PAGE
STATIC = 12  # places in a row of a static cache

Shape = tuple[int | str, ...]  # "S" is the sequence length


@dataclass(frozen=True)
class Input:
    """One argument of a program."""

    name: str
    shape: Shape
    dtype: torch.dtype
    kind: str = "values"  # values | cache | positions | slots | places | scale | factor
    order: tuple[int, ...] | None = None  # order of the dims in memory, outermost first
    beside: str = ""  # another argument, of the same shape, that lies before this one in the same memory


@dataclass
class Program:
    """A function as text and what it takes."""

    lines: list[str]
    inputs: list[Input]
    outputs: list[str]
    sequence: int
    other_sequence: int | None = None  # a second length to run at, where the sequence is dynamic
    notes: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        names = ", ".join(item.name for item in self.inputs)
        body = "\n".join(self.lines) + f"\nreturn ({', '.join(self.outputs)},)"
        return f"def program({names}):\n" + textwrap.indent(body, "    ")

    @property
    def coarsest(self) -> torch.dtype:
        """The least precise dtype, FP8 aside, that the program computes in."""
        dtypes = [torch.float32, torch.float16, torch.bfloat16]
        used = {item.dtype for item in self.inputs}
        return max(
            (dtype for dtype in dtypes if dtype in used or str(dtype) in self.source),
            key=lambda dtype: torch.finfo(dtype).eps,
            default=torch.float32,
        )

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        exec(compile(self.source, "<program>", "exec"), space)
        return space["program"]

    def arguments(self, sequence: int, seed: int = 0) -> list[Tensor]:
        """Fresh arguments for one length."""
        generator = torch.Generator().manual_seed(seed)
        made = {item.name: _argument(item, sequence, generator) for item in self.inputs}
        for item in self.inputs:
            if item.beside:
                both = torch.stack((made[item.beside], made[item.name]))
                made[item.beside], made[item.name] = both.unbind(0)
        return list(made.values())

    def runs(self) -> bool:
        """Whether plain eager code runs it: a view may meet strides that do not allow it."""
        try:
            self.function()(*self.arguments(self.sequence))
        except RuntimeError:
            return False
        return True

    def describe(self) -> str:
        shapes = "\n".join(
            f"# {i.name}: {i.kind} {list(i.shape)} {i.dtype}{f' order {i.order}' if i.order else ''}"
            f"{f' beside {i.beside}' if i.beside else ''}"
            for i in self.inputs
        )
        return f"# S = {self.sequence}, other S = {self.other_sequence}\n{shapes}\n{self.source}"


def _argument(item: Input, sequence: int, generator: torch.Generator) -> Tensor:
    shape = [sequence if size == "S" else int(size) for size in item.shape]
    if item.kind == "positions":
        return torch.randint(0, ROWS, shape, generator=generator).to(item.dtype)
    if item.kind == "slots":
        return _distinct(shape, CAPACITY, generator).to(item.dtype)
    if item.kind == "wrapped_slots":
        return (_distinct(shape, CAPACITY, generator) - CAPACITY // 2).to(item.dtype)
    if item.kind == "places":
        return _distinct(shape, STATIC, generator).to(item.dtype)
    if item.kind == "scale":
        return (torch.rand(shape, generator=generator) * 0.02 + 0.01).to(item.dtype)
    if item.dtype.is_complex:
        angle = torch.rand(shape, generator=generator) * 6.0
        return torch.polar(torch.ones_like(angle), angle).to(item.dtype)
    values = torch.randn(shape, generator=generator)
    dtype = item.dtype
    if dtype == torch.uint8:
        values, dtype = values.to(torch.float8_e4m3fn).view(torch.uint8), torch.uint8
    if item.order is not None:
        inverse = [item.order.index(dim) for dim in range(len(shape))]
        values = values.permute(item.order).contiguous().permute(inverse)
    return values.to(dtype)


def _distinct(shape: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Different indices, because a write to one place twice has no defined result."""
    total = 1
    for size in shape:
        total *= size
    return torch.randperm(count, generator=generator)[:total].reshape(shape)


class ProgramBuilder:
    """Draws one program. Every method appends lines and returns the name that holds its result."""

    def __init__(self, choices: Choices) -> None:
        self.c = choices
        self.lines: list[str] = []
        self.inputs: dict[str, Input] = {}
        self.outputs: list[str] = []
        self._count = 0

    # names and lines

    def set(self, stem: str, expression: str) -> str:
        self._count += 1
        name = f"{stem}{self._count}"
        self.lines.append(f"{name} = {expression}")
        return name

    def take(self, name: str, shape: Shape, dtype: torch.dtype, kind: str = "values", **options: Any) -> str:
        if name not in self.inputs:
            self.inputs[name] = Input(name, shape, dtype, kind, **options)
        return name

    # the program

    def build(self) -> Program:
        c = self.c
        self.dtype = c.pick([torch.float32, torch.bfloat16, torch.bfloat16, torch.float16])
        self.layout = c.pick(["thd", "bshd", "bhsd"])
        self.batch = 1 if self.layout == "thd" else c.pick([1, 2, 3])
        most = CAPACITY // self.batch
        sequence = c.pick([3, 1, 2, 5, 4, 0 if c.flag(20) else 6])
        dynamic = sequence > 1 and c.flag(10)
        sequence = min(sequence, most)
        self.q_heads, self.k_heads = c.pick([(2, 2), (4, 2), (3, 1), (1, 1), (6, 2)])
        self.dim = c.pick([8, 16, 4, 10, 6, 2])
        self.v_dim = self.dim if c.flag(80) else c.pick([4, 6])
        self.rotary = self.dim
        self.start = 0
        if self.dim > 2 and c.flag(30):
            self.rotary = c.pick(list(range(2, self.dim, 2)))
            self.start = c.pick([0, self.dim - self.rotary, (self.dim - self.rotary) // 2])
        self.form = c.pick(["neox_half", "neox_full", "interleaved_half", "interleaved_full", "complex", "halves_out"])
        self.math = c.pick(["float", "own", "promote"])
        kind = c.pick(["prologue"] * 5 + ["inverse", "inverse", "cache"])
        layers = c.pick([1, 1, 1, 2, 3]) if kind != "inverse" else 1
        cos_sin = None
        for layer in range(layers):
            self.layer = layer
            if cos_sin is None or c.flag(15):
                cos_sin = self.cos_sin() if kind != "cache" else ("", "")
            if kind == "prologue":
                self.prologue(*cos_sin)
            elif kind == "inverse":
                self.inverse(*cos_sin)
            else:
                self.cache_only()
        if not self.outputs:
            self.outputs.append(next(iter(self.inputs)))
        other = c.pick([size for size in (2, 3, 4, 5, 6) if size <= most and size != sequence]) if dynamic else None
        return Program(self.lines, list(self.inputs.values()), self.outputs, sequence, other)

    def prologue(self, cos: str, sin: str) -> None:
        c = self.c
        q, k, v = self.qkv()
        self.disturb(q, k, v, cos)
        twist = c.pick(["none"] * 9 + ["inverse", "sign_first", "sign_second", "swap", "missing", "mixed"])
        q_rot = self.rotate(q, cos, sin, twist if c.flag(60) else "none")
        if c.flag(8) and self.form != "complex":  # a k that is rotated by something else
            cos, sin = self.cos_sin()
        k_rot = self.rotate(k, cos, sin, twist)
        self.disturb(q_rot, k_rot, v, q)
        if c.flag(12):
            k_rot = self.after_rotation(k_rot)
        if c.flag(8):
            q_rot = self.after_rotation(q_rot)
        if c.flag(8):
            v = self.set("v", f"{v} + {q_rot}.float().mean().to({v}.dtype)")  # V depends on the rotated q
        q8 = self.quantise(q_rot, self.q_heads) if c.flag(50) else None
        if c.flag(5) and q8 is not None:  # little, because a sum adds up what rounding to FP8 did to each element
            v = self.set("v", f"{v} + {q8}.float().sum().mul(1e-6).to({v}.dtype)")
        if c.flag(85):
            self.write_caches(k_rot, v, k)
        self.disturb(q_rot, k_rot, v, cos)
        if q8 is not None:
            self.outputs.append(q8)
        if q8 is None or c.flag(30):
            self.outputs.append(q_rot)
        if c.flag(35):
            self.outputs.append(k_rot)
        if c.flag(6):
            self.lines.append(f"{q}.copy_({q_rot})" if q in self.inputs else f"{q} = {q_rot}.clone()")

    def inverse(self, cos: str, sin: str) -> None:
        x = self.take("x", self.shape(self.q_heads, self.dim), self.dtype)
        out = self.rotate(x, cos, sin, "inverse")
        if self.c.flag(40):
            out = self.set("out", f"{out}.to(torch.{self.c.pick(['bfloat16', 'float16', 'float32'])})")
        if self.c.flag(20):
            out = self.quantise(out, self.q_heads)
        elif self.c.flag(30):
            out = self.quantise_groups(out)
        elif self.c.flag(20):
            out = self.set("moved", f"{out}.transpose({self.c.pick(['0, 1', '-2, -3', '1, 2'])}).contiguous()")
            if self.c.flag(50):
                out = self.set("flat", f"{out}.flatten(-2)")
        if self.c.flag(30):
            self.outputs.append(x)
        self.outputs.append(out)

    def cache_only(self) -> None:
        _, k, v = self.qkv()
        self.write_caches(k, v, k)
        if self.c.flag(50):
            self.outputs.append(self.set("sum", f"{k} * 2"))

    # activations

    def shape(self, heads: int, dim: int) -> Shape:
        return {"thd": ("S", heads, dim), "bshd": (self.batch, "S", heads, dim), "bhsd": (self.batch, heads, "S", dim)}[
            self.layout
        ]

    def qkv(self) -> tuple[str, str, str]:
        n = self.layer
        parts = [("q", self.q_heads, self.dim), ("k", self.k_heads, self.dim), ("v", self.k_heads, self.v_dim)]
        how = self.c.pick(["inputs", "packed", "strided", "projected", "packed_slices"])
        if how in ("inputs", "strided"):
            order = None
            if how == "strided":
                rank = len(self.shape(1, 1))
                order = (rank - 2, *range(rank - 2), rank - 1)
            taken = [
                self.take(f"{name}_{n}", self.shape(heads, dim), self.dtype, order=order) for name, heads, dim in parts
            ]
            return taken[0], taken[1], taken[2]
        sizes = [heads * dim for _, heads, dim in parts]
        lead: Shape = ("S",) if self.layout == "thd" else (self.batch, "S")
        if how == "projected":
            hidden = self.take(f"hidden_{n}", (*lead, 6), self.dtype)
            weight = self.take(f"weight_{n}", (6, sum(sizes)), self.dtype)
            packed = self.set("qkv", f"{hidden} @ {weight}")
        else:
            packed = self.take(f"qkv_{n}", (*lead, sum(sizes)), self.dtype)
        if how == "packed_slices":
            bounds = [0, sizes[0], sizes[0] + sizes[1], sum(sizes)]
            flat = [
                self.set(f"{p[0]}_flat", f"{packed}[..., {a}:{b}]")
                for p, a, b in zip(parts, bounds[:-1], bounds[1:], strict=True)
            ]
        else:
            whole = self.set("parts", f"{packed}.split({sizes}, dim=-1)")
            flat = [f"{whole}[{index}]" for index in range(3)]
        result = []
        for (name, heads, dim), source in zip(parts, flat, strict=True):
            if self.layout == "thd":
                text = f"{source}.view(-1, {heads}, {dim})"
            else:
                text = f"{source}.view({self.batch}, -1, {heads}, {dim})"
                if self.layout == "bhsd":
                    text += ".transpose(1, 2)"
            result.append(self.set(name, text))
        return result[0], result[1], result[2]

    # cos and sin

    def cos_sin(self) -> tuple[str, str]:
        c = self.c
        full = self.form.endswith("_full")
        width = self.rotary if full else self.rotary // 2
        dtype = c.pick([torch.float32, self.dtype])
        index = c.pick([torch.int64, torch.int32])
        batched = self.layout != "thd"
        position_shape: Shape = c.pick([("S",), (1, "S"), (self.batch, "S")]) if batched else ("S",)
        positions = self.take(f"positions_{self._count}", position_shape, index, "positions")
        how = c.pick(["joint", "tables", "rows", "computed", "select"])
        tag = self._count
        if self.form == "complex" and c.flag(50):
            table = self.take(f"cis_table_{tag}", (ROWS, width), torch.complex64)
            cis = self.set("cis", f"{table}[{positions}]")
            return self.for_heads(cis, len(position_shape)), ""
        if how == "joint":
            table = self.take(f"table_{tag}", (ROWS, 2 * width), dtype)
            rows = self.set("rows", f"{table}[{positions}]")
            cut = c.pick(["chunk", "slice"])
            if cut == "chunk":
                pair = self.set("pair", f"{rows}.chunk(2, dim=-1)")
                cos, sin = f"{pair}[0]", f"{pair}[1]"
            else:
                cos, sin = f"{rows}[..., :{width}]", f"{rows}[..., {width}:]"
        elif how in ("tables", "select"):
            tables = [self.take(f"{name}_table_{tag}", (ROWS, width), dtype) for name in ("cos", "sin")]
            if how == "select" and len(position_shape) == 1:
                cos, sin = (f"{table}.index_select(0, {positions})" for table in tables)
            elif how == "select":
                cos, sin = (f"F.embedding({positions}, {table})" for table in tables)
            else:
                cos, sin = (f"{table}[{positions}]" for table in tables)
        elif how == "rows":
            shape = (*position_shape, width)
            cos, sin = (self.take(f"{name}_{tag}", shape, dtype) for name in ("cos", "sin"))
        else:
            frequencies = self.take(f"inv_freq_{tag}", (self.rotary // 2,), torch.float32)
            angle = self.set("angle", f"{positions}[..., None].float() * {frequencies}")
            if full:
                angle = self.set(
                    "angle",
                    f"torch.cat(({angle}, {angle}), dim=-1)"
                    if self.form == "neox_full"
                    else f"{angle}.repeat_interleave(2, dim=-1)",
                )
            factor = " * 1.0" if c.flag(30) else " * 1.25" if c.flag(20) else ""
            cos, sin = f"{angle}.cos(){factor}", f"{angle}.sin(){factor}"
        cast = c.pick(["", "own", "float"])
        text = {"": "", "own": f".to({self.dtype})", "float": ".float()"}[cast]
        cos, sin = self.set("cos", f"({cos}){text}"), self.set("sin", f"({sin}){text}")
        if self.form == "complex":
            cis = self.set("cis", f"torch.complex({cos}.float(), {sin}.float())")
            return self.for_heads(cis, len(position_shape)), ""
        return self.for_heads(cos, len(position_shape)), self.for_heads(sin, len(position_shape), "sin")

    def for_heads(self, name: str, position_rank: int, stem: str = "cos") -> str:
        """cos or sin with a dim for the heads."""
        if self.layout == "bhsd":
            return name if position_rank == 1 else self.set(stem, f"{name}.unsqueeze(1)")
        return self.set(stem, f"{name}.unsqueeze(-2)")

    # rotations

    def rotate(self, x: str, cos: str, sin: str, twist: str) -> str:
        c = self.c
        partial = self.rotary != self.dim
        part = self.set("part", f"{x}[..., {self.start}:{self.start + self.rotary}]") if partial else x
        if self.math == "float" or self.form == "complex":
            part = self.set("wide", f"{part}.float()")
        elif self.math == "own":
            cos, sin = f"{cos}.to({self.dtype})", f"{sin}.to({self.dtype})"
        turned = self.turn(part, cos, sin, twist)
        if c.flag(90):
            turned = self.set("turned", f"{turned}.to({x}.dtype)" if c.flag(50) else f"{turned}.type_as({x})")
        if not partial:
            return turned
        how = c.pick(["cat", "assign"])
        if how == "assign":
            out = self.set("out", f"{x}.clone()")
            self.lines.append(f"{out}[..., {self.start}:{self.start + self.rotary}] = {turned}")
            return out
        pieces = [turned]
        if self.start:
            pieces.insert(0, f"{x}[..., :{self.start}]")
        if self.start + self.rotary < self.dim:
            pieces.append(f"{x}[..., {self.start + self.rotary}:]")
        return self.set("out", f"torch.cat(({', '.join(pieces)}), dim=-1)")

    def turn(self, x: str, cos: str, sin: str, twist: str) -> str:
        c = self.c
        half = self.rotary // 2
        if self.form == "complex":
            pairs = self.set("z", f"torch.view_as_complex({x}.reshape(*{x}.shape[:-1], {half}, 2).contiguous())")
            cis = f"{cos}.conj()" if twist == "inverse" else cos
            return self.set("turned", f"torch.view_as_real({pairs} * {cis}).flatten(-2)")
        if self.form.startswith("neox"):
            cuts = [
                f"{x}.chunk(2, dim=-1)",
                f"({x}[..., :{half}], {x}[..., {half}:])",
                f"{x}.split({half}, dim=-1)",
                f"{x}.unflatten(-1, (2, {half})).unbind(-2)",
            ]
        else:
            cuts = [
                f"({x}[..., ::2], {x}[..., 1::2])",
                f"{x}.unflatten(-1, ({half}, 2)).unbind(-1)",
                f"{x}.reshape(*{x}.shape[:-1], {half}, 2).unbind(-1)",
            ]
        a, b = f"a{self._count}", f"b{self._count}"
        self.lines.append(f"{a}, {b} = {c.pick(cuts)}")
        if twist == "swap":
            cos, sin = sin, cos
        first_sign, second_sign = "-", "+"
        if twist == "inverse":
            first_sign, second_sign = "+", "-"
        elif twist == "sign_first":
            first_sign = "+"
        elif twist == "sign_second":
            second_sign = "-"
        if self.form.endswith("_full"):
            return self.turn_full(x, a, b, cos, sin, first_sign, second_sign, twist)
        product = self.product
        first = f"{product(a, cos)} {first_sign} {product(b, sin)}"
        second = f"{product(b, cos)} {second_sign} {product(a, sin)}"
        if twist == "missing":
            second = product(b, cos)
        elif twist == "mixed":
            second = f"{product(b, cos)} {second_sign} {product(b, sin)}"
        elif c.flag(20) and second_sign == "+":
            second = f"{product(a, sin)} + {product(b, cos)}"
        first, second = self.set("first", first), self.set("second", second)
        if self.form == "interleaved_half":
            joins = [f"torch.stack(({first}, {second}), dim=-1).flatten(-2)"]
        else:
            joins = [
                f"torch.cat(({first}, {second}), dim=-1)",
                f"torch.stack(({first}, {second}), dim=-2).flatten(-2)",
            ]
        return self.set("turned", c.pick(joins))

    def turn_full(self, x: str, a: str, b: str, cos: str, sin: str, first: str, second: str, twist: str) -> str:
        """`x * cos + turned(x) * sin` with one column of cos and sin for each element."""
        pieces = [f"-{b}" if first == "-" else b, a if second == "+" else f"-{a}"]
        sign = "+"
        if self.c.flag(25):  # the same with both signs on the other side
            pieces = [piece[1:] if piece.startswith("-") else f"-{piece}" for piece in pieces]
            sign = "-"
        if twist == "missing":
            pieces[1] = f"{a} * 0"
        elif twist == "mixed":
            pieces[1] = b
        joined = (
            f"torch.cat(({pieces[0]}, {pieces[1]}), dim=-1)"
            if self.form == "neox_full"
            else f"torch.stack(({pieces[0]}, {pieces[1]}), dim=-1).flatten(-2)"
        )
        turned = self.set("half_turned", joined)
        return self.set("turned", f"{self.product(x, cos)} {sign} {self.product(turned, sin)}")

    def product(self, left: str, right: str) -> str:
        return f"({left} * {right})" if self.c.flag(75) else f"({right} * {left})"

    # what a program may do to a rotated tensor

    def after_rotation(self, x: str) -> str:
        how = self.c.pick(
            ["scale", "add_in_place", "negate", "round_trip", "contiguous", "flip", "clone_scale_in_place"]
        )
        if how == "add_in_place":
            x = self.set("copy", f"{x}.clone()")
            self.lines.append(f"{x}.add_(0.5)")
            return x
        if how == "clone_scale_in_place":
            x = self.set("copy", f"{x}.clone()")
            self.lines.append(f"{x}[..., :1].mul_(2.0)")
            return x
        return self.set(
            "after",
            {
                "scale": f"{x} * 0.5",
                "negate": f"-{x}",
                "round_trip": f"{x}.float().to({x}.dtype)",
                "contiguous": f"{x}.contiguous()",
                "flip": f"{x}.flip(-2)",
            }[how],
        )

    # quantisation

    def quantise(self, x: str, heads: int) -> str:
        c = self.c
        fp8 = c.pick(["float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"])
        limit = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[fp8]
        if c.flag(12):
            limit = c.pick([2.0, 240.0, 448.5])
        how = c.pick(["scalar", "one", "number", "scalar_reciprocal", "per_head"])
        if how == "number":
            scale = c.pick(["0.02", "0.05", "1.0"])
        else:
            shape: Shape = {"scalar": (), "one": (1,), "scalar_reciprocal": (), "per_head": (heads, 1)}[how]
            if how == "per_head" and self.layout == "bhsd":
                shape = (heads, 1, 1)
            scale = self.take(f"scale_{self._count}", shape, torch.float32, "scale")
        wide = f"{x}.float()" if c.flag(70) else x
        if how == "scalar_reciprocal":
            scaled = f"{wide} * (1.0 / {scale})" if c.flag(50) else f"{wide} * {scale}.reciprocal()"
        else:
            scaled = f"{wide} / {scale}" if c.flag(75) else f"{wide} * {scale}"
        clamp = c.pick(
            [
                f".clamp({-limit}, {limit})",
                f".clamp(min={-limit}).clamp(max={limit})",
                f".clamp(max={limit}).clamp(min={-limit})",
            ]
        )
        if c.flag(8):
            clamp = f".clamp(max={limit})" if c.flag(50) else f".clamp({-limit / 2}, {limit})"
        scaled = self.set("scaled", f"({scaled}){clamp}")
        if c.flag(6):
            scaled = self.set("scaled", f"{scaled}.to(torch.bfloat16)")
        return self.set("q8_", f"{scaled}.to(torch.{fp8})")

    def quantise_groups(self, x: str) -> str:
        """FP8 values and a scale for each group of elements of a head; the scales become an output."""
        c = self.c
        size = c.pick([self.dim, self.dim // 2])
        least, limit = c.pick([1e-4, 1e-10]), 448.0 if c.flag(85) else 240.0
        groups = self.set("groups", f"{x}.float().unflatten(-1, (-1, {size}))")
        scales = self.set("scales", f"{groups}.abs().amax(-1, keepdim=True).clamp(min={least}) / {limit}")
        if c.flag(30):
            scales = self.set("scales", f"torch.exp2(torch.ceil(torch.log2({scales})))")
        scaled = f"{groups} / {scales}" if c.flag(60) else f"{groups} * (1.0 / {scales})"
        values = self.set("values", f"({scaled}).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).flatten(-2)")
        self.outputs.append(self.set("scales", f"{scales}.squeeze(-1)"))
        return values

    # cache writes

    def write_caches(self, k: str, v: str, k_before: str) -> None:
        c = self.c
        n = 0 if c.flag(8) else self.layer
        batched = self.layout != "thd"
        layouts = ["paged", "paged_heads", "flat", "merged"]
        layouts += ["joint_first", "joint_inside"] * (self.v_dim == self.dim) + ["static_heads", "static"] * batched
        layout = c.pick(layouts)
        static = layout.startswith("static")
        cache_dtype = c.pick([self.dtype, self.dtype, torch.float32, torch.float8_e4m3fn, torch.uint8])
        self.cache_dtype = cache_dtype
        index = c.pick([torch.int64, torch.int64, torch.int32])
        name = f"{layout}_{str(cache_dtype).removeprefix('torch.')}_{n}"
        spelling = c.pick(["natural", "split", "copy", "scatter"])
        if static:
            places = self.take(f"places_{self._count}", ("S",), torch.int64, "places")
            slots = places
        else:
            kind = "wrapped_slots" if c.flag(8) and spelling in ("natural", "split") else "slots"
            count: Shape = ("S",) if not batched else (self.batch, "S")
            slots = self.take(f"slots_{self._count}", count, index, kind)
            if batched:
                slots = self.set("slots", f"{slots}.flatten()")
            if c.flag(8):
                slots = self.set("slots", f"({slots} + 1) % {CAPACITY}")
        if layout.startswith("joint"):
            shape: Shape = (2, BLOCKS, PAGE) if layout == "joint_first" else (BLOCKS, 2, PAGE)
            cache = self.take(f"{name}_kv", (*shape, self.k_heads, self.dim), cache_dtype, "cache")
            dim = 0 if layout == "joint_first" else 1
            if c.flag(50):
                caches = [self.set("part", f"{cache}.select({dim}, {i})") for i in (0, 1)]
            else:
                whole = self.set("parts", f"{cache}.unbind({dim})")
                caches = [f"{whole}[0]", f"{whole}[1]"]
            if c.flag(10):
                caches.reverse()
        else:
            caches = []
            for part, dim in (("k", self.dim), ("v", self.v_dim)):
                shape = {
                    "paged": (BLOCKS, PAGE, self.k_heads, dim),
                    "paged_heads": (BLOCKS, self.k_heads, PAGE, dim),
                    "flat": (CAPACITY, self.k_heads, dim),
                    "merged": (CAPACITY, self.k_heads * dim),
                    "static_heads": (self.batch, self.k_heads, STATIC, dim),
                    "static": (self.batch, STATIC, self.k_heads, dim),
                }[layout]
                order = None
                if c.flag(10) and layout in ("paged", "static"):
                    order = (0, 2, 1, 3)
                taken = self.take(f"{name}_{part}", shape, cache_dtype, "cache", order=order)
                caches.append(taken)
            if self.v_dim == self.dim and c.flag(8) and not any(self.inputs[cache].order for cache in caches):
                self.inputs[caches[1]] = replace(self.inputs[caches[1]], beside=caches[0])
        if c.flag(6):  # the cache that is written is not the one that came in
            caches[0] = self.set("copied", f"{caches[0]}.clone()")
            self.outputs.append(caches[0])
        stored = []
        scales = self.set_scale(cache_dtype)
        for value, dim, scale in ((k, self.dim, scales[0]), (v, self.v_dim, scales[1])):
            stored.append((self.store_form(value, cache_dtype, scale), dim))
        writes = list(zip(caches, stored, strict=True))
        if c.flag(15):
            writes.reverse()
        if c.flag(10):
            writes = writes[:1]
        other = slots
        if c.flag(6):  # one of the two goes elsewhere
            other = self.set("other_slots", f"({slots} + 1) % {STATIC if static else CAPACITY}")
        self.cache_disturbance(caches, cache_dtype)
        again = self.store_form(k_before, cache_dtype, scales[0]) if c.flag(8) else None
        if again is not None and c.flag(50):  # what is overwritten at once
            self.write(layout, caches[0], again, self.dim, slots, spelling)
        for index_of, (cache, (value, dim)) in enumerate(writes):
            self.write(layout, cache, value, dim, slots if index_of == 0 else other, spelling)
            if index_of == 0:
                self.cache_disturbance(caches, cache_dtype)
        if again is not None and c.flag(50):
            self.write(layout, caches[0], again, self.dim, slots, spelling)
        self.cache_disturbance(caches, cache_dtype)

    def set_scale(self, cache_dtype: torch.dtype) -> list[str]:
        if cache_dtype.itemsize > 1 or self.c.flag(15):
            return ["", ""]
        how = self.c.pick(["two", "one", "number", "per_head"])
        if how == "number":
            return ["0.05", "0.03"]
        shape: Shape = ()
        if how == "per_head":
            shape = (self.k_heads, 1, 1) if self.layout == "bhsd" else (self.k_heads, 1)
        first = self.take(f"k_scale_{self._count}", shape, torch.float32, "scale")
        second = first if how == "one" else self.take(f"v_scale_{self._count}", shape, torch.float32, "scale")
        return [first, second]

    def store_form(self, value: str, cache_dtype: torch.dtype, scale: str) -> str:
        if cache_dtype.itemsize == 1:
            view = ".view(torch.uint8)" if cache_dtype == torch.uint8 else ""
            if not scale:
                return self.set("stored", f"{value}.to(torch.float8_e4m3fn){view}")
            return self.set("stored", f"({value}.float() / {scale}).clamp(-448.0, 448.0).to(torch.float8_e4m3fn){view}")
        return self.set("stored", f"{value}.to({cache_dtype})")

    def write(self, layout: str, cache: str, value: str, dim: int, slots: str, spelling: str) -> None:
        c = self.c
        heads = self.k_heads
        if layout.startswith("static"):
            return self.write_static(layout, cache, value, slots, spelling)
        rows = self.rows(value, heads, dim)
        if layout in ("paged", "joint_first", "joint_inside"):
            if layout == "joint_inside" or spelling == "split":
                self.lines.append(f"{cache}[{slots} // {PAGE}, {slots} % {PAGE}] = {rows}")
                return None
            flat = (
                c.pick([f"{cache}.view(-1, {heads}, {dim})", f"{cache}.flatten(0, 1)"]) if "order" not in cache else ""
            )
            if self.inputs.get(cache) is not None and self.inputs[cache].order is not None:
                self.lines.append(f"{cache}[{slots} // {PAGE}, {slots} % {PAGE}] = {rows}")
                return None
            return self.write_flat(flat, rows, slots, spelling)
        if layout == "paged_heads":
            self.lines.append(f"{cache}[{slots} // {PAGE}, :, {slots} % {PAGE}] = {rows}")
            return None
        if layout == "merged":
            rows = self.set("rows", f"{rows}.flatten(1)")
        return self.write_flat(cache, rows, slots, spelling)

    def write_flat(self, cache: str, rows: str, slots: str, spelling: str) -> None:
        c = self.c
        if spelling in ("copy", "scatter") and self.cache_dtype.itemsize == 1:  # no FP8 code in index_copy and scatter
            cache, rows = f"{cache}.view(torch.uint8)", self.set("rows", f"{rows}.view(torch.uint8)")
        elif self.cache_dtype.itemsize > 1 and c.flag(6):
            bits = {2: "int16", 4: "int32"}[self.cache_dtype.itemsize]
            cache, rows = f"{cache}.view(torch.{bits})", self.set("rows", f"{rows}.view(torch.{bits})")
        if spelling == "copy":
            self.lines.append(f"{cache}.index_copy_(0, {slots}.long(), {rows})")
        elif spelling == "scatter":
            ones = f"{slots}.long().reshape(-1, *[1] * ({rows}.dim() - 1)).expand_as({rows})"
            self.lines.append(f"{cache}.scatter_(0, {ones}, {rows})")
        else:
            self.lines.append(f"{cache}[{slots}] = {rows}")

    def write_static(self, layout: str, cache: str, value: str, places: str, spelling: str) -> None:
        wanted = "bhsd" if layout == "static_heads" else "bshd"
        if self.layout != wanted:
            value = self.set("stored", f"{value}.transpose(1, 2)")
        dim = 2 if layout == "static_heads" else 1
        before = ":, " * dim
        if spelling == "copy" and self.cache_dtype.itemsize > 1:
            self.lines.append(f"{cache}.index_copy_({dim}, {places}, {value})")
        elif spelling == "scatter":
            length = f"{value}.shape[{dim}]"
            self.lines.append(f"{cache}[{before}2:2 + {length}] = {value}")
        else:
            self.lines.append(f"{cache}[{before}{places}] = {value}")

    def rows(self, value: str, heads: int, dim: int) -> str:
        if self.layout == "thd":
            return value
        if self.layout == "bhsd":
            value = f"{value}.transpose(1, 2)"
        return self.set("rows", f"{value}.reshape(-1, {heads}, {dim})")

    # disturbances

    def disturb(self, first: str, second: str, third: str, fourth: str) -> None:
        """Now and then another user, or a write in place, of a value that a fusion would like to have for itself."""
        c = self.c
        if not c.flag(12):
            return
        victim = c.pick([first, second, third, fourth])
        how = c.pick(["return", "double", "in_place", "view_in_place"])
        if how == "return":
            self.outputs.append(victim)
        elif how == "double":
            self.outputs.append(self.set("extra", f"{victim} * 2"))
        elif how == "in_place":
            self.lines.append(f"{victim}.mul_(1.5)")
        else:
            self.lines.append(f"{victim}[..., :1].zero_()")

    def cache_disturbance(self, caches: list[str], cache_dtype: torch.dtype) -> None:
        c = self.c
        if not c.flag(10):
            return
        cache = c.pick(caches)
        wide = "" if cache_dtype.itemsize > 1 else ".view(torch.float8_e4m3fn).float()"
        how = c.pick(["read", "sum", "in_place", "fill"]) if cache_dtype.itemsize > 1 else "read"
        if how == "read":
            self.outputs.append(self.set("seen", f"{cache}[:1].clone(){wide}"))
        elif how == "sum":
            self.outputs.append(self.set("seen", f"{cache} * 2"))
        elif how == "in_place":
            self.lines.append(f"{cache}.mul_(0.5)")
        else:
            self.lines.append(f"{cache}[1:2].fill_(3.0)")


def draw_program(choices: Choices) -> Program:
    """One random program."""
    return ProgramBuilder(choices).build()
