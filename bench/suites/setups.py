"""The servers that several suites measure on.  Suites that name the same setup share its server."""

from __future__ import annotations

from bench.plan import Plan, Setup


def steady(plan: Plan) -> list[Setup]:
    """Traced servers for the price of a step: a device that is free, and in a full run one that takes its time."""
    found = []
    for stage in plan.stages:
        sizes = [(1, 1), (2, 1), (1, 2)] + ([(4, 1)] if plan.full else [])
        for tp, dp in sizes:
            if stage == 1 and dp > 1:
                continue
            for decode_ms in (0.0, 8.0) if plan.full and dp == 1 else (0.0,):
                found.append(Setup(stage, tp, dp, decode_ms=decode_ms, traced=True))
                if stage == 4 and (plan.full or dp == 1):
                    found.append(in_turn(tp, dp, decode_ms))
        if plan.full:
            found.append(Setup(stage, device="cpu", traced=True))
    return found


def in_turn(tp: int, dp: int, decode_ms: float) -> Setup:
    """Stage 4 without overlap."""
    return Setup(4, tp, dp, decode_ms=decode_ms, variant="in_turn", flags=("--disable-overlap-schedule",), traced=True)


def what(setup: Setup) -> dict[str, str | int | float | bool]:
    """What the cases of a setup say about it."""
    device = f"sim {setup.decode_ms:g} ms" if setup.device == "sim" else "SmolLM2-135M"
    said: dict[str, str | int | float | bool] = {"tp": setup.tp, "dp": setup.dp, "device": device}
    if setup.stage == 4:
        said["overlap"] = setup.variant != "in_turn"
    return said
