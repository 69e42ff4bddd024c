"""Predicts what `ans_decode` and loads of coded cells take on a GPU, from constants, beside what was measured.

    python -m benchmarks.gpu_model

The measurements are of one NVIDIA H200, on 2026-11-26, with bitstreams that had no groups. docs/kernels.md explains
the formulas. Whoever has no GPU can ask this model what a change would give, and when a prompt has its first token.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

MULTIPROCESSORS, CLOCK_HZ = 132, 1.98e9
LANES, SPAN_TOKENS, TOKENS = 32, 1024, 32768
MiB = 1 << 20

# Of the kernel without groups.
ROW_S, STEP_S = 0.45e-6, 0.26e-6  # what a warp waits: besides the steps of a row, and for a step of 32 tokens
STEP_INSTRUCTIONS = 82
LINES = 38  # of the first cache that a step reads, one a cycle: 32 of the table, and 6 others

# Of a load.
COPY_BYTES_S = 55.3e9  # from pinned memory
COPY_GAP_S = 3.1e-6  # of a copy beside its bytes: one of 64 KiB took 4.3 us
RESTORE_S = 281e-6 / 32  # a cell: `restore_klt` with two stages; a column of cells has 32
CHECKSUM_S, CHECKSUM_CHAIN_S = 1.07e-3 / 1408, 0.3e-3  # `xxh3`: a cell of a full chip, and one alone
EAGER_RESTORE_S = 419e-6 / 32  # with one stage
HELD = 0.75
CONNECTIONS = 8  # of streams to the device: CUDA_DEVICE_MAX_CONNECTIONS
LAUNCH_S = 10e-6
GROUP_CELLS, LAYER_GROUPS = 128, 11
ROWS, CODED_BYTES = 999, 540e6  # of a cell, and of the load that was measured


@dataclass(frozen=True)
class Kernel:
    """What `ans_decode` waits and computes. ``tokens``: of a bitstream, or of a group."""

    tokens: int = SPAN_TOKENS
    row_s: float = ROW_S
    step_s: float = STEP_S
    step_instructions: float = STEP_INSTRUCTIONS

    def chain_s(self, rows: int) -> float:
        """Return what a launch of few warps takes."""
        return rows * (self.row_s + self.step_s * self.tokens / LANES)

    def busy_s(self, cells: float, rows: int) -> float:
        """Return what the first caches of a full chip take."""
        return cells * rows * SPAN_TOKENS / LANES * LINES / (MULTIPROCESSORS * CLOCK_HZ)

    def launch_s(self, cells: int, rows: int) -> float:
        steps = cells * rows * (SPAN_TOKENS / LANES + SPAN_TOKENS / self.tokens)  # a row's class is one, too
        issue_s = steps * self.step_instructions / (4 * MULTIPROCESSORS * CLOCK_HZ)
        return norm(3, self.chain_s(rows), self.busy_s(cells, rows), issue_s)


def norm(power: float, *seconds: float) -> float:
    """Return a time that is at least the longest of these, and a little more if several are as long."""
    return float(math.fsum(s**power for s in seconds) ** (1 / power))


@dataclass(frozen=True)
class Load:
    """32,768 tokens of `klt`, by default. ``restore_s``, ``check_s``: of a cell. ``checks_last``: whether `xxh3` comes
    after the restore. ``most_groups``: how many layer groups a part may have; each part up to twice as many as the one
    before. ``copies``: that bring a part, in one launch; from `memory_cache`, one a span. ``bitstreams``: of a cell,
    with ``rows`` each, and ``tables_bytes`` of decoding tables. ``layer_groups``: of the model."""

    rows: int = ROWS
    coded_bytes: float = CODED_BYTES
    restore_s: float = RESTORE_S
    checks_last: bool = False
    most_groups: int = 1
    copies: int = 1
    check_s: float = CHECKSUM_S
    group_cells: int = GROUP_CELLS
    bitstreams: int = 1
    tables_bytes: int = 0
    layer_groups: int = LAYER_GROUPS

    @property
    def cells(self) -> int:
        return self.group_cells * self.layer_groups

    @property
    def cell_bytes(self) -> float:
        return self.coded_bytes / self.cells

    def parts(self, lane_mib: int) -> list[int]:
        """Return the cells of each part that goes through so much scratch memory."""
        group, scratch = self.group_cells, self.bitstreams * (self.rows * SPAN_TOKENS + self.tables_bytes)
        fit = int(lane_mib * MiB / (self.cell_bytes + scratch))
        if fit < group:
            num_cut = math.ceil(group / fit)
            return [group // num_cut + (i < group % num_cut) for i in range(num_cut)] * self.layer_groups
        found: list[int] = []
        while (left := self.layer_groups - sum(found)) > 0:
            found.append(min(left, fit // group, self.most_groups, 2 ** len(found)))
        return [group * groups for groups in found]


@dataclass(frozen=True)
class Times:
    """``load_s``: of a load alone. ``lost_s``: what decode passes beside it lose in all."""

    load_s: float
    lost_s: float


def run(
    lanes: int, lane_mib: int, kernel: Kernel, load: Load, *, restores_from_s: float = 0.0, decodes_from_s: float = 0.0
) -> Times:
    """Let a load's parts go through lanes in turn. What is ready first begins first. ``restores_from_s``: when the pass
    ends that may still write the slots. ``decodes_from_s``: the same for decoding, if it waits, too."""
    parts = load.parts(lane_mib)
    lanes = min(lanes, CONNECTIONS)
    ready: list[tuple[float, int, int]] = []  # time, part, stage
    free_s = [0.0] * lanes
    copied_s = decoded_s = restored_s = 0.0  # when all that has begun of each kind has ended
    next_part = 0
    decoding_s = lost_s = 0.0
    order = ["decode", "restore", "check"] if load.checks_last else ["decode", "check", "restore"]
    in_use = [False] * lanes
    while ready or next_part < len(parts):
        while next_part < len(parts) and not in_use[next_part % lanes]:
            lane = next_part % lanes
            in_use[lane] = True
            copy_s = LAUNCH_S + (load.copies - 1) * COPY_GAP_S + parts[next_part] * load.cell_bytes / COPY_BYTES_S
            copied_s = max(copied_s, free_s[lane]) + copy_s
            heapq.heappush(ready, (copied_s, next_part, 0))
            next_part += 1
        now_s, part, stage = heapq.heappop(ready)
        cells = parts[part]
        if stage == len(order):
            free_s[part % lanes], in_use[part % lanes] = now_s, False
            continue
        begin_s = now_s + LAUNCH_S
        if order[stage] == "decode":
            begin_s, bitstreams = max(begin_s, restored_s, decodes_from_s), cells * load.bitstreams
            end_s = begin_s + kernel.launch_s(bitstreams, load.rows)
            if decoded_s > begin_s:  # beside others, with which it shares the first caches
                end_s = max(end_s, decoded_s + kernel.busy_s(bitstreams, load.rows))
            decoding_s += max(0.0, end_s - max(begin_s, decoded_s)) * held(bitstreams * SPAN_TOKENS / kernel.tokens)
            decoded_s = max(decoded_s, end_s)
        elif order[stage] == "restore":  # does not share multiprocessors with `ans_decode`
            begin_s = max(begin_s, restored_s, decoded_s, restores_from_s)
            restored_s = end_s = begin_s + cells * load.restore_s
            lost_s += cells * load.restore_s
        else:
            check_s = max(CHECKSUM_CHAIN_S * load.bitstreams, cells * load.check_s)
            end_s = begin_s + check_s
            lost_s += check_s * held(cells)
        heapq.heappush(ready, (end_s, part, stage + 1))
    return Times(max(free_s), lost_s + decoding_s)


def held(warps: float) -> float:
    """Return the share of its time for which a launch of single warps takes the chip from other kernels. Fitted to the
    two loads beside decode passes that were measured."""
    return float(HELD * math.sqrt(min(1.0, warps / MULTIPROCESSORS)))


DECODED_MS = {  # `sub.py`: tokens of a bitstream, then cells and milliseconds; 699 rows
    1024: {1: 6.24, 43: 6.26, 128: 6.67, 1408: 7.31},
    512: {1: 3.33, 43: 3.49, 128: 3.55, 1408: 5.37},
    256: {1: 1.93, 43: 2.00, 128: 1.95, 1408: 4.83},
    128: {1: 1.20, 43: 1.14, 128: 1.17, 1408: 4.51},
    64: {1: 0.70, 43: 0.71, 128: 0.79, 1408: 4.86},
    32: {1: 0.46, 43: 0.48, 128: 0.76, 1408: 6.30},
}
LOADED_MS = {  # `ring.py`: streams and MiB of scratch memory of each
    (1, 64): 348,
    (2, 64): 182,
    (4, 64): 103,
    (8, 64): 69,
    (16, 64): 65,
    (1, 256): 135,
    (4, 256): 60,
    (8, 32): 104,
    (16, 32): 95,
}


# A column of cells: 32,768 tokens, three layers of two heads of 128, K and V.
_RESTORE_COEFFICIENTS = 700
_TILES = 12  # heads of K and V in a cell's layers: a program's share of the channels is one
_CHANNELS = 128  # of a head
_RESTORE_CLOCK_HZ = 1.77e9  # of an H200 that restores, as its profiler said
_REGISTERS, _SHARED_BYTES, _BLOCK_BYTES = 65536, 227 << 10, 1024  # of a multiprocessor; of which each program has some
_MATRIX_FLOPS, _L2_BYTES_S = 790e12, 5.5e12
# What the profiler said of two launches: cycles between two instructions of a warp, by the warps of a scheduler.
_WARP_CYCLES = {2: 6.80, 4: 8.68}


@dataclass(frozen=True)
class RestoreProgram:
    """A program of `restore_klt`, as it is compiled. ``instructions``: of a warp, in all.
    ``shared_cycles``: of its accesses of shared memory, at 128 bytes a cycle."""

    tokens: int
    warps: int
    registers: int
    shared_bytes: int
    instructions: int
    shared_cycles: int

    @property
    def at_once(self) -> int:
        """How many programs a multiprocessor runs."""
        by_registers = _REGISTERS // (32 * self.warps * -(-self.registers // 8) * 8)
        return min(by_registers, _SHARED_BYTES // (self.shared_bytes + _BLOCK_BYTES))

    def bounds_us(self) -> dict[str, float]:
        """Return what a column takes at least."""
        programs = TOKENS // self.tokens * _TILES
        on_each = programs / MULTIPROCESSORS
        few, many = _WARP_CYCLES
        slope = (_WARP_CYCLES[many] - _WARP_CYCLES[few]) / (many - few)
        cycles = _WARP_CYCLES[few] + slope * (self.at_once * self.warps / 4 - few)
        matrix = 2 * TOKENS * _TILES * _CHANNELS * _RESTORE_COEFFICIENTS
        read = programs * _RESTORE_COEFFICIENTS * (self.tokens + 2 * _CHANNELS)
        return {
            "warps": 1e6 * on_each / self.at_once * self.instructions * cycles / _RESTORE_CLOCK_HZ,
            "shared memory": 1e6 * on_each * self.shared_cycles / _RESTORE_CLOCK_HZ,
            "L2 cache": 1e6 * read / _L2_BYTES_S,
            "tensor cores": 1e6 * matrix / _MATRIX_FLOPS,
        }

    def column_us(self) -> float:
        return norm(3, *self.bounds_us().values())


# As Triton 3.6 compiled the kernel that was measured, whose cycles of shared memory are those of today's by 704 a step.
RESTORED_US = {
    "as Triton compiles it by itself": (RestoreProgram(128, 8, 142, 41216, 4638, 8700), 419),
    "with 128 registers": (RestoreProgram(128, 8, 128, 41216, 4634, 8700), 295),
    "with 2 stages": (RestoreProgram(128, 8, 128, 40960, 4128, 8700), 281),
    "without a rotation, in the profiler": (RestoreProgram(128, 8, 125, 82430, 4476, 8700), 275),
}


BESIDE_MS = {64: (794, 11.7, 14.6), 256: (357, 11.7, 15.4)}  # a load; decode passes alone and beside it


def rows() -> Iterator[tuple[str, float, float]]:
    """Yield what was measured: its name, the predicted milliseconds, and the measured ones."""
    for tokens, by_cells in DECODED_MS.items():
        for cells, measured in by_cells.items():
            yield (f"ans_decode, {cells} cells of {tokens} tokens a bitstream", _ms(Kernel(tokens), cells), measured)
    for how, (program, measured_us) in RESTORED_US.items():
        yield f"restore_klt, a column, {how}", program.column_us() / 1e3, measured_us / 1e3
    for (streams, mib), measured in LOADED_MS.items():
        yield f"a load, {streams} x {mib} MiB", 1e3 * run(streams, mib, Kernel(), Load()).load_s, measured
    for mib, (load_ms, alone_ms, beside_ms) in BESIDE_MS.items():
        lost_s = run(1, mib, Kernel(), Load(restore_s=EAGER_RESTORE_S)).lost_s
        yield f"decode passes lose by a load, 1 x {mib} MiB", 1e3 * lost_s, load_ms * (1 - alone_ms / beside_ms)


# The kernel of groups, with its 57 instructions a step. At worst a step waits as long as before; at best 175 cycles, by
# the latencies that docs/kernels.md adds up.
NOW = {
    "at worst": Kernel(128, ROW_S, STEP_S, 57),
    "at best": Kernel(128, 150 / CLOCK_HZ, 175 / CLOCK_HZ, 57),
}


EXPECTED_RESTORE_S, GOAL_RESTORE_S = 219e-6 / 32, 150e-6 / 32  # docs/kernels.md: with the options of today
SCRATCH = (1, 64), (2, 32), (2, 64), (2, 128), (2, 256), (3, 171), (4, 128)  # lanes and the MiB of each


EXACT_BITS, KLT_BITS = 10.42, 1.5  # of a value, on SmolLM2-135M
DEVICE_COPY_BYTES_S = 4225e9  # read and written
HEAD_DIM, CELL_LAYERS = 128, 3


@dataclass(frozen=True)
class Engine:
    """A model in bfloat16. ``heads``: of K and V, on each of its ``ranks``; a cell of `exact` has ``exact_heads`` of
    them, one of `klt` ``klt_heads``. ``width``: of queries, all heads together."""

    name: str
    layers: int
    heads: int
    ranks: int
    exact_heads: int
    klt_heads: int
    parameters: float
    width: int

    def values(self, tokens: int) -> int:
        """Return how many values of K and V a rank has."""
        return 2 * self.layers * self.heads * HEAD_DIM * tokens

    def exact(self, tokens: int, restore_share: float) -> Load:
        """Return a load of `exact`, whose restore takes ``restore_share`` of a device copy's bytes a second."""
        rows = CELL_LAYERS * self.exact_heads * HEAD_DIM
        return Load(
            rows,
            self.values(tokens) * EXACT_BITS / 8,
            2 * rows * SPAN_TOKENS * 4 / (restore_share * DEVICE_COPY_BYTES_S),
            checks_last=True,
            most_groups=LAYER_GROUPS,
            check_s=2 * CHECKSUM_S * rows / ROWS,
            group_cells=tokens // SPAN_TOKENS * self.heads // self.exact_heads,
            bitstreams=2,  # the exponents of K and of V
            tables_bytes=64 << 10,
            layer_groups=-(-self.layers // CELL_LAYERS),
        )

    def klt(self, tokens: int, column_s: float) -> Load:
        """Return a load of `klt`. ``column_s``: of 32 cells of two heads."""
        share = self.klt_heads / 2  # of rows, and of channels
        return Load(
            int(_RESTORE_COEFFICIENTS * share),
            self.values(tokens) * KLT_BITS / 8,
            column_s / 32 * share**2,
            checks_last=True,
            most_groups=LAYER_GROUPS,
            check_s=CHECKSUM_S * share,
            group_cells=tokens // SPAN_TOKENS * self.heads // self.klt_heads,
            layer_groups=-(-self.layers // CELL_LAYERS),
        )

    def flops(self, tokens: int) -> float:
        """Return what a rank computes of a prompt: products with weights, and the attention to all tokens before."""
        return (2 * self.parameters * tokens + 2 * self.layers * self.width * tokens**2) / self.ranks


LLAMA_8B = Engine("8B", 32, 8, 1, 4, 2, 8.0e9, 4096)
LLAMA_70B = Engine("70B, TP 8", 80, 1, 8, 1, 1, 70.6e9, 8192)
LENGTHS = 8192, TOKENS
LINKS_GBPS = 10, 40, 100

# Of a first token. At best, attention is as fast as products, and a pass behind a hit takes what SGLang's own kernels
# and CUDA graphs are said to; at worst both are as measured on the H200, with stand-ins for `sgl_kernel`.
FLOPS = LLAMA_8B.flops(8192) / 0.274  # a second: what computing 8,192 tokens reached there
COMPUTED_S = {(LLAMA_8B.name, TOKENS): 2.669}
FIRST_PASS_S = 0.025, 0.110  # until the first token, of a prompt that is in the pool
HAND_OVERS_S = 0.005, 0.020  # lookup, hand-overs, and a step of the scheduler
PLANE_BYTES_S = 7e9, 3.4e9  # coded bytes that a rank's data plane verifies, at best by arithmetic (docs/benchmarks.md)


@dataclass(frozen=True)
class FirstToken:
    """Seconds until a prompt's first token, at best and at worst, by how it comes."""

    engine: Engine
    tokens: int

    def computed(self) -> tuple[float, float]:
        best = self.engine.flops(self.tokens) / FLOPS
        return best, COMPUTED_S.get((self.engine.name, self.tokens), best)

    def from_host_tier(self) -> tuple[float, float]:
        """Raw values in pinned memory, of SGLang's hierarchical cache."""
        copies_s = 2 * self.engine.values(self.tokens) / COPY_BYTES_S
        return FIRST_PASS_S[0] + copies_s, FIRST_PASS_S[1] + copies_s

    def loads(self, coding: str) -> tuple[Load, Load]:
        if coding == "exact":
            return self.engine.exact(self.tokens, 1.0), self.engine.exact(self.tokens, 0.5)
        return self.engine.klt(self.tokens, EXPECTED_RESTORE_S * 32), self.engine.klt(self.tokens, RESTORE_S * 32)

    def load_s(self, coding: str) -> tuple[float, float]:
        best, worst = self.loads(coding)
        return run(2, 256, NOW["at best"], best).load_s, run(2, 256, NOW["at worst"], worst).load_s

    def fetched(self, coding: str, gbps: float | None) -> tuple[float, float]:
        """``gbps``: of the machine's link, which all ranks share; None from `memory_cache`."""
        found = []
        for load, load_s, step_s, pass_s, plane_bytes_s in zip(
            self.loads(coding), self.load_s(coding), HAND_OVERS_S, FIRST_PASS_S, PLANE_BYTES_S, strict=True
        ):
            of_link_s = 0.0 if gbps is None else load.coded_bytes * self.engine.ranks * 8e-9 / gbps
            read_s = 0.0 if gbps is None else max(of_link_s, load.coded_bytes / plane_bytes_s)
            found.append(step_s + read_s + load_s + pass_s)
        return found[0], found[1]


PASS_S = 10e-3  # a decode pass of an 8B model


def predictions() -> Iterator[tuple[str, float, float]]:
    """Yield what has not been measured: its name, and the milliseconds at best and at worst."""
    best, worst = NOW["at best"], NOW["at worst"]
    for cells in (1, 43, 1408):
        yield f"ans_decode, {cells} cells, 699 rows", _ms(best, cells), _ms(worst, cells)
    for restore_s, lanes, mib in [
        *((RESTORE_S, *each) for each in SCRATCH),
        *((each, 2, 256) for each in (EXPECTED_RESTORE_S, GOAL_RESTORE_S)),
    ]:
        load = Load(700, 403e6, restore_s, checks_last=True, most_groups=LAYER_GROUPS)
        about = f"{lanes} x {mib} MiB, {len(load.parts(mib))} parts, {32e6 * restore_s:.0f} us a column"
        at_best, at_worst = (run(lanes, mib, kernel, load) for kernel in (best, worst))
        yield f"a load, {about}", 1e3 * at_best.load_s, 1e3 * at_worst.load_s
        yield f"passes lose by it, {about}", 1e3 * at_best.lost_s, 1e3 * at_worst.lost_s
    for restore_s in (RESTORE_S, EXPECTED_RESTORE_S):
        spread = Load(700, 403e6, restore_s, checks_last=True, most_groups=LAYER_GROUPS, copies=TOKENS // SPAN_TOKENS)
        of_spread = [1e3 * run(2, 256, kernel, spread).load_s for kernel in (best, worst)]
        about = f"32 copies a part, {32e6 * restore_s:.0f} us a column"
        yield f"a load from memory_cache, 2 x 256 MiB, {about}", of_spread[0], of_spread[1]
    for about, loads in {
        "klt": [Load(700, 403e6, checks_last=True, most_groups=LAYER_GROUPS)] * 2,
        "exact": [LLAMA_8B.exact(TOKENS, share) for share in (1.0, 0.5)],
    }.items():
        for how, decodes_from_s in (("decoding waits for it", PASS_S), ("only restoring waits", 0.0)):
            found = [
                run(2, 256, kernel, load, restores_from_s=PASS_S, decodes_from_s=decodes_from_s)
                for kernel, load in zip((best, worst), loads, strict=True)
            ]
            left = [1e3 * (each.load_s - PASS_S) for each in found]
            when = f"a load that begins with a pass of {1e3 * PASS_S:g} ms"
            yield f"{about}, {TOKENS:,} tokens: {when}, after it, {how}", left[0], left[1]
    for tokens in (8192, TOKENS):
        about, loads = f"exact, {tokens:,} tokens", [LLAMA_8B.exact(tokens, share) for share in (1.0, 0.5)]
        kinds = list(zip((best, worst), loads, strict=True))
        raw_ms, coded_ms = (1e3 * x / COPY_BYTES_S for x in (2 * LLAMA_8B.values(tokens), loads[0].coded_bytes))
        cells = loads[0].cells
        decode = [1e3 * kernel.launch_s(2 * cells, load.rows) for kernel, load in kinds]
        restore = [1e3 * cells * load.restore_s for load in loads]
        found = [run(2, 256, *each) for each in kinds]
        yield f"{about}: copies as raw values, as SGLang's host tier has them", raw_ms, raw_ms
        yield f"{about}: copies", coded_ms, coded_ms
        yield f"{about}: ans_decode, all in one launch", decode[0], decode[1]
        yield f"{about}: restore_exact", restore[0], restore[1]
        of_load = f"a load, 2 x 256 MiB, {len(loads[0].parts(256))} parts"
        yield f"{about}: {of_load}", 1e3 * found[0].load_s, 1e3 * found[1].load_s
        yield f"{about}: passes lose by it", 1e3 * found[0].lost_s, 1e3 * found[1].lost_s


def load_rows() -> Iterator[list[str]]:
    """Yield rows of what a load takes, in milliseconds: copies, `ans_decode` and the restore each by itself, and the
    load, in which they overlap."""
    for engine in (LLAMA_8B, LLAMA_70B):
        for tokens in LENGTHS:
            prompt = FirstToken(engine, tokens)
            raw_s = 2 * engine.values(tokens) / COPY_BYTES_S
            yield [f"{engine.name}, {tokens:,} tokens", "raw", _range(raw_s, raw_s), "", "", _range(raw_s, raw_s)]
            for coding in CODINGS:
                loads, copy_s = prompt.loads(coding), prompt.loads(coding)[0].coded_bytes / COPY_BYTES_S
                decode_s = (
                    NOW[when].launch_s(load.bitstreams * load.cells, load.rows)
                    for when, load in zip(("at best", "at worst"), loads, strict=True)
                )
                restore_s = (load.cells * load.restore_s for load in loads)
                parts = _range(copy_s, copy_s), _range(*decode_s), _range(*restore_s), _range(*prompt.load_s(coding))
                yield ["", coding, *parts]


def first_token_rows() -> Iterator[list[str]]:
    """Yield rows of milliseconds to the first token: computed, from memory, and over links."""
    for engine in (LLAMA_8B, LLAMA_70B):
        for tokens in LENGTHS:
            prompt = FirstToken(engine, tokens)
            ways = {"computed": prompt.computed(), "SGLang's host tier": prompt.from_host_tier()}
            for where, gbps in (("`memory_cache`", None), *((f"{gbps} Gbps", gbps) for gbps in reversed(LINKS_GBPS))):
                ways |= {f"{where}, {coding}": prompt.fetched(coding, gbps) for coding in CODINGS}
            yield [f"{engine.name}, {tokens:,} tokens", *(_range(*each) for each in ways.values())]


CODINGS = "exact", "klt"
_LOAD_COLUMNS = "a load, ms, not measured", "", "copies", "decoded", "restored", "in all"
_FIRST_COLUMNS = (
    *("first token, ms, not measured", "computed", "host tier", "memory, exact", "klt"),
    *(f"{gbps} Gbps, exact" if coding == "exact" else coding for gbps in reversed(LINKS_GBPS) for coding in CODINGS),
)


def _range(best_s: float, worst_s: float) -> str:
    best, worst = (f"{1e3 * x:,.1f}" if x < 0.1 else f"{1e3 * x:,.0f}" for x in (best_s, worst_s))
    return best if best == worst else f"{best} to {worst}"


def _ms(kernel: Kernel, cells: int) -> float:
    return 1e3 * kernel.launch_s(cells, 699)


def main() -> int:
    print("| milliseconds, H200 | predicted | measured | error |\n|---|---|---|---|")
    for name, predicted, measured in rows():
        print(f"| {name} | {predicted:.2f} | {measured:g} | {100 * (predicted / measured - 1):+.0f}% |")
    print("\n| not measured | at best | at worst |\n|---|---|---|")
    for name, best, worst in predictions():
        print(f"| {name} | {best:.2f} | {worst:.2f} |")
    for columns, found in ((_LOAD_COLUMNS, load_rows()), (_FIRST_COLUMNS, first_token_rows())):
        print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
        for row in found:
            print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
