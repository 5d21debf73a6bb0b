"""Runs many random cases and prints the first failures and the figures.

    python tests/trust/soak.py --soak 50000 --seed 1

Every program counts as one case, and so does each perturbed copy of its graphs.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rope_fusion.options import Options
from trust.choices import SeededChoices
from trust.differential import Captured, Outcome, capture, check_captured
from trust.mutate import mutate
from trust.programs import Program, draw_program


class Soak:
    """Counts cases and keeps the first failures."""

    def __init__(self, options: Options, most_failures: int) -> None:
        self.options = options
        self.exact = options.numerics == "exact"
        self.most_failures = most_failures
        self.hits: collections.Counter[str] = collections.Counter()
        self.count: collections.Counter[str] = collections.Counter()
        self.worst = 0.0

    @property
    def broken(self) -> bool:
        return self.count["failed"] >= self.most_failures

    def case(self, kind: str, name: str, describe: Callable[[], str], check: Callable[[], Outcome]) -> bool:
        """Run one case; whether it passed."""
        self.count[kind] += 1
        try:
            outcome = check()
        except Exception as error:
            self.count["failed"] += 1
            print(f"\n==== {kind} {name}\n{describe()}")
            print("".join(traceback.format_exception(error)[-6:])[-3000:], flush=True)
            return False
        self.hits.update(outcome.hits)
        self.count[f"{kind} with hits"] += bool(outcome.hits)
        self.worst = max(self.worst, outcome.worst)
        return True

    def program(self, seed: str, mutations: int) -> None:
        """One random program and perturbed copies of its graphs."""
        program = draw_program(SeededChoices(seed))
        if not program.runs():
            self.count["no program"] += 1
            return
        captured: list[Captured] = []

        def check() -> Outcome:
            captured.extend(capture(program))
            return check_captured(captured, self.options, exact=self.exact)

        if not self.case("programs", seed, program.describe, check):
            return
        for index in range(mutations):
            self.mutation(program, captured, f"{seed}/{index}")
            if self.broken:
                return

    def mutation(self, program: Program, captured: list[Captured], seed: str) -> None:
        choices = SeededChoices(seed)
        if not captured:
            return
        mutated = mutate(choices.pick(captured), choices)
        if mutated is None:
            self.count["no mutation"] += 1
            return
        call, what = mutated
        self.case(
            "mutations",
            seed,
            lambda: f"{what}\n{program.describe()}\n{call.graph.graph}",
            lambda: check_captured([call], self.options, exact=self.exact),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soak", type=int, default=1000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first program")
    parser.add_argument("--mutations", type=int, default=3, help="perturbed copies of each program's graphs")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    parser.add_argument("--numerics", default="fp32", choices=("fp32", "exact"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex operators")
    soak = Soak(Options(kernels="reference", numerics=arguments.numerics, strict=True), arguments.failures)
    begin = time.perf_counter()
    index = arguments.start
    while soak.count["programs"] + soak.count["mutations"] < arguments.soak and not soak.broken:
        soak.program(f"{arguments.seed}/{index}", arguments.mutations)
        index += 1
        if index % 200 == 0:
            print(f"{index} programs, {time.perf_counter() - begin:.0f} s: {dict(soak.count)}", flush=True)
    print(
        f"seed {arguments.seed}, programs {arguments.start} to {index - 1}: {dict(soak.count)}, hits {dict(soak.hits)}, "
        f"largest error {soak.worst:.2f} of what is allowed, {time.perf_counter() - begin:.0f} s"
    )
    return 1 if soak.count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
