"""Modes `dual` and `expand` on a real engine: FP8 that attention reads in place against the same FP8 as BF16, bit for
bit, and no flag is ever stale.

Two engines with kvtier's backend are asked the same: one restores FP8 in place, one expands it. Scales are powers of
two, so both see the same numbers, and their logits must be equal in every bit, whatever was evicted, preempted, failed
or saved again on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.connectors.vllm.dual import DualEngine
from tests.connectors.vllm.engine import prompt
from tests.connectors.vllm.models import make
from tests.support.daemon import Daemon, MiB

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 24
PROMPTS = {letter: prompt(500 + at) for at, letter in enumerate("ABCDE")}
SMALL = "ACABDBACEA"  # with a cache of 45 pages, of which a request takes 20: pages change hands all the time
Logits = np.ndarray[Any, np.dtype[np.float32]]
SYNC = {"load": "sync"}


def play(engine: DualEngine, letters: str, directory: Path) -> tuple[list[dict[str, Any]], Logits]:
    """One request after the other; their answers and the logits of all."""
    engine.logits(directory)
    answers = [engine.run(PROMPTS[letter], max_tokens=TOKENS) for letter in letters]
    return answers, engine.logits(directory)


def relative(found: Logits, right: Logits) -> float:
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def restoring(engine: DualEngine, directory: Path) -> dict[str, Any]:
    """What both engines are asked, once the store has all prompts."""
    told: dict[str, Any] = {}
    assert engine.ask("forget")
    told["once"] = play(engine, "A", directory)
    assert engine.ask("forget")
    told["small"] = play(engine, SMALL, directory)
    assert engine.ask("forget")
    engine.ask("fault", on="load", kind="cut", at=3)
    answers, logits = play(engine, "A", directory)
    assert engine.ask("faults") == 1
    told["failed"] = (
        answers,
        logits[-TOKENS:],
    )  # before them comes the step that ran on what was not there, whose answer vLLM drops
    told["metrics"], told["counters"] = engine.ask("metrics"), engine.ask("counters")
    return told


@pytest.fixture(scope="module")
def told(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Three engines, and what each of them said."""
    directory = tmp_path_factory.mktemp("logits")
    options: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 45, "keep_logits": True}
    found: dict[str, Any] = {}
    with DualEngine(tiny, None, dual=False, **options) as stock:
        found["stock"] = play(stock, "ABCDE", directory)
    with Daemon(256 * MiB) as daemon:
        with DualEngine(tiny, daemon.socket, settings={"mode": "dual", **SYNC}, **options) as engine:
            found["layout"] = engine.ask("layout")
            found["native"] = play(engine, "ABCDE", directory)
            engine.ask("watch_flags")
            found["dual"] = restoring(engine, directory)
            found["flags"] = engine.ask("watched_flags")
            found["said"] = engine.said()
            assert engine.ask("forget")
            engine.run(PROMPTS["B"], max_tokens=1)
            before, stored = engine.ask("metrics"), engine.ask("digests", forget=True)
            found["again"] = engine.run(PROMPTS["B"], max_tokens=1)
            found["verbatim"] = engine.ask("metrics")["kvtier_verbatim_blocks"] - before.get(
                "kvtier_verbatim_blocks", 0
            )
            found["digests"] = (stored, engine.ask("digests"))
            whole = prompt(577, 608)
            engine.run(whole, max_tokens=1)
            assert engine.ask("forget")
            found["whole"] = engine.run(whole, max_tokens=1)
            for letter in "ABCDE":  # the store has them all again, none of them computed behind FP8
                assert engine.ask("forget")
                engine.run(PROMPTS[letter], max_tokens=1)
            with DualEngine(tiny, daemon.socket, settings={"mode": "expand", **SYNC}, **options) as other:
                found["expand"] = restoring(other, directory)
            assert engine.ask("forget")
            engine.ask("never_clear")
            found["mutant"] = [answer["tokens"] for answer in play(engine, SMALL, directory)[0]]
            found["mutant flags"] = engine.ask("watched_flags")
        daemon.quiet()
    yield found


def test_without_an_fp8_page_the_backend_is_the_stock_one_up_to_rounding(told: dict[str, Any]) -> None:
    assert told["layout"][0] == "tests.connectors.vllm.cpu_backend"
    (stock, right), (native, logits) = told["stock"], told["native"]
    first = slice(None, None, TOKENS)  # the first token of each prompt: later ones may follow another token
    error = relative(logits[first], right[first])
    equal = sum(a == b for a, b in zip(tokens_of(stock), tokens_of(native), strict=True))
    print(f"dual against stock: relative {error:.2g} over 5 prompts, tokens of {equal} of 5 equal")
    assert error < 0.02 and [answer["external"] for answer in native] == [0] * 5


def test_a_prefix_restored_in_place_is_the_expanded_one_bit_for_bit(told: dict[str, Any]) -> None:
    (answers, logits), (expanded, right) = told["dual"]["once"], told["expand"]["once"]
    assert answers[0]["external"] == answers[0]["served"] == expanded[0]["external"] == 576
    assert np.array_equal(logits, right) and tokens_of(answers) == tokens_of(expanded)
    exact = told["native"][1][:1]
    print(f"FP8 against exact BF16, first token: relative {relative(logits[:1], exact):.3g}")
    assert 0 < relative(logits[:1], exact) < 0.5


def test_a_small_cache_whose_pages_change_hands_is_right_bit_for_bit(told: dict[str, Any]) -> None:
    (answers, logits), (expanded, right) = told["dual"]["small"], told["expand"]["small"]
    assert [a["cached"] for a in answers] == [a["cached"] for a in expanded] and sum(
        a["external"] for a in answers
    ) > 2000
    assert np.array_equal(logits, right) and tokens_of(answers) == tokens_of(expanded)


def test_no_flag_is_stale(told: dict[str, Any]) -> None:
    seen = told["flags"]
    print(f"the oracle: {seen}")
    assert seen["reads"] >= 1000 and seen["fp8"] > 500
    assert seen["stale"] == 0 and seen["null"] == 0


def test_never_clearing_a_flag_is_caught(told: dict[str, Any]) -> None:
    assert told["mutant flags"]["stale"] > 0
    assert told["mutant"] != tokens_of(told["dual"]["small"][0])


def test_a_failed_load_is_recomputed_from_there(told: dict[str, Any]) -> None:
    (answers, logits), (expanded, right) = told["dual"]["failed"], told["expand"]["failed"]
    assert answers[0]["served"] == expanded[0]["served"] == 96 and answers[0]["reason"] == "length"
    assert np.array_equal(logits, right) and tokens_of(answers) == tokens_of(expanded)


def test_a_page_that_is_fp8_is_saved_again_as_it_is(told: dict[str, Any]) -> None:
    stored, again = told["digests"]
    assert told["again"]["external"] == 0 and told["again"]["cached"] == 576  # the engine's own prefix cache, FP8 pages
    assert told["verbatim"] == len(again) == 18 and again.items() <= stored.items()


def test_the_last_token_is_never_offered(told: dict[str, Any]) -> None:
    assert told["whole"]["external"] == 576  # of 608 tokens in 19 whole blocks


def test_the_modes_say_themselves_and_are_counted(told: dict[str, Any]) -> None:
    assert "mode dual" in told["said"]
    assert told["dual"]["metrics"]["kvtier_mode{dual}"] == told["expand"]["metrics"]["kvtier_mode{expand}"] == 1
    dual, expand = told["dual"]["counters"], told["expand"]["counters"]
    native = 32 * 2 * 2 * 2 * 64 * 2  # bytes of a block of 2 layers and heads in BF16
    assert expand["expand_bytes"] == native * expand["expand_blocks"] > 0 and expand["expand_seconds"] > 0
    assert dual.get("expand_blocks", 0) == 0 and dual["quantize_seconds"] > 0
    assert dual["load_bytes"] == expand["load_bytes"] < 0.52 * native * expand["expand_blocks"]


# Batches, windows, layouts, other processes


def both(
    model: Path, options: dict[str, Any], settings: dict[str, Any], letters: str, directory: Path, batch: bool
) -> list[dict[str, Any]]:
    """A dual engine that fills the store and then restores from it, and one that expands: {"answers", "logits",
    "metrics", "flags"} of each."""
    told = []
    with Daemon(256 * MiB) as daemon:
        for mode in ("dual", "expand"):
            with DualEngine(
                model, daemon.socket, settings={"mode": mode, **settings}, block_size=32, keep_logits=True, **options
            ) as engine:
                one: dict[str, Any] = {}
                if mode == "dual":
                    for letter in sorted(set(letters)):
                        engine.run(PROMPTS[letter], max_tokens=1)
                    assert engine.ask("forget")
                    engine.ask("watch_flags")
                engine.logits(directory)
                if batch:
                    one["answers"] = engine.run_all([PROMPTS[letter] for letter in letters], max_tokens=TOKENS)
                    one["logits"] = engine.logits(directory)
                else:
                    one["answers"], one["logits"] = play(engine, letters, directory)
                if mode == "dual":
                    one["flags"] = engine.ask("watched_flags")
                told.append({**one, "metrics": engine.ask("metrics")})
        daemon.quiet()
    return told


def test_eight_requests_at_once_in_chunks_with_preemptions(tiny: Path, tmp_path: Path) -> None:
    options = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 256}
    dual, expand = both(tiny, options, SYNC, "ABCADBEA", tmp_path, batch=True)
    assert (
        dual["metrics"]["num_preemptions"] > 0
        and dual["metrics"]["num_preemptions"] == expand["metrics"]["num_preemptions"]
    )
    print(
        f"{dual['metrics']['num_preemptions']:.0f} preemptions, {len(dual['logits'])} tokens, the oracle: "
        f"{dual['flags']}"
    )
    assert np.array_equal(dual["logits"], expand["logits"]) and tokens_of(dual["answers"]) == tokens_of(
        expand["answers"]
    )
    assert (
        dual["answers"][0]["external"] > 0
        and dual["flags"]["fp8"] > 0
        and dual["flags"]["stale"] == dual["flags"]["null"] == 0
    )


@pytest.mark.parametrize("layers", ["every layer", "every other layer"])
def test_a_sliding_window(tmp_path: Path, layers: str) -> None:
    """In every other layer: two KV cache groups over one pool of pages, and one set of flags."""
    mixed = layers == "every other layer"
    model = make(tmp_path / "window", num_hidden_layers=4 if mixed else 2)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128}
    if mixed:
        config["layer_types"] = ["sliding_attention", "full_attention"] * 2
    (model / "config.json").write_text(json.dumps(config))
    dual, expand = both(model, {"num_gpu_blocks_override": 72 if mixed else 36}, {}, SMALL, tmp_path, batch=False)
    print(f"the oracle: {dual['flags']}")
    assert np.array_equal(dual["logits"], expand["logits"]) and tokens_of(dual["answers"]) == tokens_of(
        expand["answers"]
    )
    assert sum(answer["external"] for answer in dual["answers"]) > 0 and dual["flags"]["fp8"] > 0
    assert dual["flags"]["stale"] == dual["flags"]["missing"] == dual["flags"]["null"] == 0


def test_expand_on_the_engines_own_attention(tiny: Path, told: dict[str, Any], tmp_path: Path) -> None:
    """vLLM's CPU backend packs K: it is quantized as it lies, and comes back as close as kvtier's backend has it."""
    options: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 45, "keep_logits": True}
    with (
        Daemon(64 * MiB) as daemon,
        DualEngine(tiny, daemon.socket, dual=False, settings={"mode": "expand", **SYNC}, **options) as engine,
    ):
        right = play(engine, "A", tmp_path)[1][:1]
        assert engine.ask("forget")
        answers, logits = play(engine, "A", tmp_path)
        assert answers[0]["external"] == answers[0]["served"] == 576 and "mode expand" in engine.said()
        assert engine.ask("counters")["expand_blocks"] == 18
    found, theirs = relative(logits[:1], right), relative(told["dual"]["once"][1][:1], told["native"][1][:1])
    print(f"expanded against exact BF16, first token: relative {found:.3g}, with kvtier's backend {theirs:.3g}")
    assert 0.3 * theirs < found < 3 * theirs


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])  # the engine itself takes LBNHC
def test_other_physical_layouts(tiny: Path, told: dict[str, Any], tmp_path: Path, layout: str) -> None:
    options: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 45, "keep_logits": True}
    with (
        Daemon(64 * MiB) as daemon,
        DualEngine(
            tiny,
            daemon.socket,
            settings={"mode": "dual", **SYNC},
            environment={"VLLM_KV_CACHE_LAYOUT": layout},
            **options,
        ) as engine,
    ):
        assert engine.ask("layout")[:2] == told["layout"][:2] and engine.ask("layout")[2] != told["layout"][2]
        engine.run(PROMPTS["A"], max_tokens=1)
        assert engine.ask("forget")
        answers, logits = play(engine, "A", tmp_path)
        assert answers[0]["external"] == 576
        assert np.array_equal(logits, told["dual"]["once"][1])


def test_a_compiled_model_and_an_engine_core_of_its_own(tiny: Path) -> None:
    """The backend comes by the entry point alone, in every process. A local hit on restored pages says what the restore
    said."""
    with (
        Daemon(64 * MiB) as daemon,
        DualEngine(
            tiny, daemon.socket, settings={"mode": "dual"}, multiprocess=True, block_size=32, enforce_eager=False
        ) as engine,
    ):
        engine.run(PROMPTS["A"], max_tokens=1)
        found: dict[str, Any] = {}
        for _ in range(50):  # until all is saved
            assert engine.ask("forget")
            found = engine.run(PROMPTS["A"])
            if found["external"] == 576:
                break
        assert found["external"] == 576 and "mode dual" in engine.said()
        local = engine.run(PROMPTS["A"])
        assert local["external"] == 0 and local["cached"] == 576 and local["tokens"] == found["tokens"]


# What it costs


def test_a_real_model_is_as_good_as_the_format_promises(tmp_path: Path) -> None:
    """SmolLM2-135M over 2,048 tokens of real text, restored in place, against the same engine on its own prefix cache:
    within docs/quality.md."""
    from bench.vllm_restore import export
    from kvtier.quality import smollm, texts

    ids = smollm.load().encode(texts.evaluation_text())[:2300]
    options: dict[str, Any] = {
        "block_size": 32,
        "max_model_len": 2400,
        "max_num_batched_tokens": 2400,
        "max_num_seqs": 2,
        "keep_logits": True,
    }
    prefix, steps = 2048, range(1, 200, 4)
    with (
        Daemon(512 * MiB) as daemon,
        DualEngine(export(tmp_path / "smollm2"), daemon.socket, settings={"mode": "dual", **SYNC}, **options) as engine,
    ):
        logits = []
        for restored in (False, True):
            if restored:
                assert engine.ask("forget")
            first = engine.run(ids[: prefix + 1], max_tokens=1)
            assert first["external"] == (prefix if restored else 0)
            engine.logits(tmp_path)
            for extra in steps:
                engine.run(ids[: prefix + 1 + extra], max_tokens=1)
            logits.append(engine.logits(tmp_path).astype(np.float64))
        assert "mode dual" in engine.said()
    native, fp8 = (
        x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True) for x in logits
    )
    kl = (np.exp(native) * (native - fp8)).sum(1)
    same = float((native.argmax(1) == fp8.argmax(1)).mean())
    print(
        f"KL {kl.mean():.4f} nats (at most {kl.max():.3f}), top-1 equal {same:.3f}, over {len(kl)} positions behind "
        f"{prefix} restored tokens"
    )
    assert 0 < kl.mean() < 0.03 and same >= 0.88
