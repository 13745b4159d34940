"""What a request's reader feels, computed from what was measured: time to the first token, between tokens, and to the
end, by a stated model.

The model is one device that does one thing at a time: the prefill of the next waiting request, else a decode step of
all that are running. A request may begin when the store has answered and its bytes have crossed the link, which takes
no time of the device. Rates are given, not measured; what the store took is measured. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness import percentile
from bench.roofline import BANDWIDTH, LINK, MODELS, Model


@dataclass(frozen=True, slots=True)
class Device:
    """A model on a device. prefill: tokens a second; bandwidth of its memory and of the link to the host, bytes a
    second."""

    model: Model = MODELS[0]
    prefill: float = 20_000.0  # Llama-3.1-8B: 32k tokens in 1.6 s
    bandwidth: float = BANDWIDTH
    link: float = LINK

    def token_bytes(self, fp8: bool) -> float:
        """KV of one token in all layers."""
        return self.model.layers * self.model.token_bytes("head" if fp8 else None)

    def step(self, context_bytes: float) -> float:
        """Seconds of one decode step over so much KV."""
        return (self.model.weight_bytes + context_bytes) / self.bandwidth


@dataclass(frozen=True, slots=True)
class Served:
    """One request as the store served it. store: seconds it took to answer and load, measured; loaded: tokens that came
    from it."""

    at: float
    tokens: int
    output: int
    loaded: int
    store: float


@dataclass(frozen=True, slots=True)
class Felt:
    """Seconds: until the first token, between tokens (mean), until the last, and of those how long the device was busy
    with others first."""

    first: float
    between: float
    last: float
    waited: float


@dataclass(slots=True)
class _Running:
    request: Served
    number: int
    first: float
    waited: float
    left: int
    context: float


def play(requests: Sequence[Served], device: Device, fp8: bool, speed: float = 1.0) -> list[Felt]:
    """What each request's reader feels when they arrive `speed` times as fast as they did. `fp8`: what was loaded is
    attended to as FP8."""
    native, small = device.token_bytes(False), device.token_bytes(fp8)
    ready = sorted(
        (r.at / speed + r.store + r.loaded * small / device.link, number, r) for number, r in enumerate(requests)
    )
    felt: dict[int, Felt] = {}
    running: list[_Running] = []
    now, at = 0.0, 0
    while at < len(ready) or running:
        if at < len(ready) and (ready[at][0] <= now or not running):
            due, number, r = ready[at]
            at += 1
            waited = max(0.0, now - due)
            now = max(now, due) + (r.tokens - r.loaded) / device.prefill
            context = r.loaded * small + (r.tokens - r.loaded) * native
            running.append(_Running(r, number, now - r.at / speed, waited, max(1, r.output), context))
            continue
        step = device.step(sum(one.context for one in running))
        steps = min(one.left for one in running)
        if at < len(ready):
            steps = min(steps, int((ready[at][0] - now) / step) + 1)
        now += steps * step
        for one in running:
            one.left -= steps
        for one in [one for one in running if one.left <= 0]:
            running.remove(one)
            last = now - one.request.at / speed
            felt[one.number] = Felt(one.first, (last - one.first) / max(1, one.request.output), last, one.waited)
    return [felt[number] for number in range(len(requests))]


def waiting_starts(requests: Sequence[Served], device: Device, fp8: bool, limit: float = 0.1) -> float:
    """Requests a second from which on half of them wait more than `limit` seconds for the device, found within 2 %. 0
    if they do at once."""

    def waits(speed: float) -> bool:
        return percentile([felt.waited for felt in play(requests, device, fp8, speed)], 50) > limit

    span = requests[-1].at - requests[0].at or 1.0
    base = len(requests) / span
    low, high = 0.0, 1 / base
    while not waits(high):
        low, high = high, 2 * high
        if high * base > 1e6:
            return high * base
    while high > 1.02 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if waits(middle) else (middle, high)
        if high < 1e-3 / base:
            return 0.0
    return low * base
