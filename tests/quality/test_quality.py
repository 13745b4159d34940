"""Calibration and comparison on a small random model: what is done to K and V is the number format's reference, to the
last bit; gaps are refused.

The real model, the must-shows and the command lines are in tests/quality/test_quality_model.py; checkers and verdicts
in tests/quality/test_quality_report.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from kvtier_kernels.reference import CODEC, MAX_SCALE, MIN_SCALE, dequantize, quantize  # noqa: E402

from kvtier.errors import Invalid  # noqa: E402
from kvtier.format import artifact  # noqa: E402
from kvtier.format.artifact import LEAST_SCALE, MOST_SCALE  # noqa: E402
from kvtier.models import scale_import  # noqa: E402
from kvtier.models.model_config import LayerCache  # noqa: E402
from kvtier.quality import (  # noqa: E402
    calibrate,
    compare,
    evaluate,
    observe,
    outlier_twin,
    retrieval,
    tasks,
    texts,
)
from kvtier.quality.loaded_model import LoadedModel, of  # noqa: E402
from kvtier.quality.retrieval import restore_state, save_state  # noqa: E402
from kvtier.quality.schemes import Quantizer, Scheme, from_artifact  # noqa: E402
from kvtier.quality.texts import Sample  # noqa: E402
from kvtier.quality.uncalibrated import uncalibrated  # noqa: E402

WIDTH = 16
TEXT = bytes(range(32, 127)) * 40


def model(layers: int = 2, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH,
        max_position_embeddings=4096,
        initializer_range=0.2,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


def make(layers: int = 2, **changes: Any) -> LoadedModel:
    return of(
        model(layers, **changes),
        lambda text: list(text.encode("ascii", "replace")),
        lambda ids: bytes(ids).decode(),
        "tiny",
        "b" * 40,
    )


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make()


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(32, 127, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def samples(number: int = 3, length: int = 64) -> list[Sample]:
    return [Sample("chat" if i % 2 else "code", tuple(text(length, i))) for i in range(number)]


def filled(loaded: LoadedModel, scheme: Scheme | None, tokens: list[int], step: int = 256) -> Any:
    cache = Quantizer(scheme).attach(loaded.empty_cache(), [0, 1])
    for at in range(0, len(tokens), step):
        loaded.logits(torch.tensor(tokens[at : at + step]), cache)
    return cache


# --- schemes


def test_constants_agree() -> None:
    assert CODEC == scale_import.CODEC
    assert (MIN_SCALE, MAX_SCALE) == (LEAST_SCALE, MOST_SCALE)


@pytest.mark.parametrize(
    ("k", "v"), [("tensor", "head"), ("head", "tensor"), ("token-head", "token-head"), ("head", "token-head")]
)
def test_what_attention_reads_is_what_the_format_decodes_to(loaded: LoadedModel, k: str, v: str) -> None:
    native = filled(loaded, None, text(40), 7).layers[0]
    scales = {
        (0, part): torch.tensor([0.01] if kind == "tensor" else [0.01, 0.003]) for part, kind in (("k", k), ("v", v))
    }
    scheme = Scheme("s", k, v, scales, frozenset((1,)))
    cache = filled(loaded, scheme, text(40), 7)
    for part, kind, got, x in (
        ("k", k, cache.layers[0].keys, native.keys),
        ("v", v, cache.layers[0].values, native.values),
    ):
        found = quantize(x[0], kind, scales[0, part] if kind in ("tensor", "head") else None)
        assert torch.equal(got[0], dequantize(found.codes, found.scales, kind))
        assert not torch.equal(got, x)


def test_formats_of_whole_blocks_leave_the_open_tail_native(loaded: LoadedModel) -> None:
    tokens, scheme = text(60), Scheme("s", "channel", "block-head")
    for step in (256, 16, 5, 1):
        # in the same steps: a matmul of another shape rounds differently
        native = filled(loaded, None, tokens, step).layers[0].keys[0]
        keys = filled(loaded, scheme, tokens, step).layers[0].keys[0]
        found = quantize(native[:, :48], "channel", engine_blocks=3)
        assert torch.equal(keys[:, :48], dequantize(found.codes, found.scales, "channel"))
        assert torch.equal(keys[:, 48:], native[:, 48:])


def test_excluded_layers_and_the_baseline_are_untouched(loaded: LoadedModel) -> None:
    tokens = text(40)
    plain = filled(loaded, None, tokens)
    assert not isinstance(plain.layers[0].__dict__.get("update"), type(lambda: 0)), (
        "nothing is attached for the baseline"
    )
    scheme = Scheme("s", "token-head", "token-head", {}, frozenset((0,)))
    other = filled(loaded, scheme, tokens)
    assert torch.equal(other.layers[0].keys, plain.layers[0].keys) and torch.equal(
        other.layers[0].values, plain.layers[0].values
    )
    assert not torch.equal(other.layers[1].keys, plain.layers[1].keys)


def test_clips_are_counted_and_gaps_refused(loaded: LoadedModel) -> None:
    quantizer = Quantizer(
        Scheme("s", "tensor", "tensor", {(layer, part): torch.tensor([1e-4]) for layer in range(2) for part in "kv"})
    )
    cache = quantizer.attach(loaded.empty_cache(), [0, 1])
    loaded.logits(torch.tensor(text(32)), cache)
    native = filled(loaded, None, text(32)).layers[0].keys
    tally = quantizer.tallies[0, "k"]
    assert (
        tally.elements == native.numel() and tally.clipped == int((native.abs() > 464e-4).sum()) > 0 == tally.nonfinite
    )
    assert tally.amax is not None and tally.amax.tolist() == native[0].abs().amax(dim=(1, 2)).tolist()
    with pytest.raises(Invalid, match="k_scale of layer 0 is missing"):
        filled(loaded, Scheme("s", "head", "head"), text(8))
    with pytest.raises(Invalid, match="'row' is no granularity"):
        Scheme("s", "row", "head")


def test_a_window_that_drops_tokens_takes_no_whole_blocks() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH,
        sliding_window=8,
    )
    windowed = of(transformers.MistralForCausalLM(config).eval(), list, str, "w", "b" * 40)
    assert {layer.window for layer in windowed.caches.layers} == {8}
    with pytest.raises(Invalid, match="layer 0 has a sliding window"):
        filled(windowed, Scheme("s", "block-head", "block-head"), text(40))
    scheme = Scheme("s", "token-head", "token-head")
    assert not torch.equal(
        filled(windowed, scheme, text(40)).layers[0].keys, filled(windowed, None, text(40)).layers[0].keys
    )


def test_layers_with_a_window_beside_full_ones_stay_native() -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=16,
        max_position_embeddings=512,
    )
    mixed = of(transformers.Qwen2ForCausalLM(config).eval(), lambda line: list(line.encode()), str, "mixed", "b" * 40)
    assert mixed.caches.windowed == {0} and make().caches.windowed == frozenset()
    settings = evaluate.EvaluationSettings(
        schemes=("token-head", "kivi", "head"), lengths=(64,), sequences=1, factor=0, passages=0
    )
    made = evaluate.run(mixed, settings, samples(), lambda length, number: [Sample("t", tuple(text(length, 3)))])
    assert [sorted(result.scheme.excluded) for result in made.cells[0].results] == [[], [0], []]
    assert set(made.cells[0].results[1].tallies) == {(1, "k"), (1, "v")}


def test_a_saved_state_comes_back_as_often_as_asked(loaded: LoadedModel) -> None:
    for scheme in (None, Scheme("s", "channel", "token-head"), Scheme("s", "token-head", "token-head")):
        cache = filled(loaded, scheme, text(37))
        state = save_state(cache)
        first = loaded.logits(torch.tensor(text(20, 5)), cache)
        restore_state(cache, state)
        assert torch.equal(loaded.logits(torch.tensor(text(20, 5)), cache), first)


# --- calibration


def test_what_is_seen_is_exact_where_it_is_said_to_be(loaded: LoadedModel) -> None:
    observer = calibrate.observe(loaded, samples())
    caches = [(sample, filled(loaded, None, list(sample.tokens))) for sample in samples()]
    for (layer, part), seen in observer.seen.items():
        tensors = {
            i: (c.layers[layer].keys if part == "k" else c.layers[layer].values)[0] for i, (_, c) in enumerate(caches)
        }
        everything = torch.cat(list(tensors.values()), dim=1).abs()
        assert seen.top.tolist() == everything.amax(dim=(1, 2)).tolist()
        assert seen.channels.tolist() == everything.amax(dim=1).tolist()
        assert seen.amax["chat"].tolist() == tensors[1].abs().amax(dim=(1, 2)).tolist()
        assert seen.samples == 3 and seen.elements == everything.numel() and seen.nonfinite == 0
        for percent in (50.0, 99.0):
            exact = np.percentile(everything.reshape(2, -1).numpy(), percent, axis=1, method="higher")
            assert observe.percentile(seen, percent) == pytest.approx(exact, rel=0.03)
        assert (observe.percentile(seen, 100.0) <= seen.top).all()
        curve = observe.clip_curve(seen, seen.top / np.float32(448))
        assert (
            curve[0] == (1.0, 0.0)
            and [share for _, share in curve] == sorted(share for _, share in curve)
            and curve[-1][1] > 0.1
        )
    assert observer.position == 63


def test_rules() -> None:
    seen = observe.Magnitudes(2, 4)
    x = torch.randn(2, 4000, 4, generator=torch.Generator().manual_seed(1))
    x[0, 0, 0] = 400.0  # one outlier
    seen.add(x, "s")
    top = seen.top
    assert calibrate.choose(seen, "head", "amax", 1.0) == pytest.approx(top / 448)
    assert calibrate.choose(seen, "head", "amax", 2.0) == pytest.approx(2 * top / 448)
    assert calibrate.choose(seen, "tensor", "amax", 1.0) == pytest.approx([400 / 448])
    assert calibrate.choose(seen, "head", "percentile", 1.0, 99.9)[0] < 0.1 * top[0] / 448
    errors = {}
    for rule in calibrate.RULES:
        scales = torch.from_numpy(calibrate.choose(seen, "head", rule, 1.0))
        found = quantize(x, "head", scales)
        errors[rule] = float(((dequantize(found.codes, found.scales, "head") - x) ** 2).mean())
    assert errors["least-error"] <= 1.02 * min(errors.values()), errors
    zero = observe.Magnitudes(2, 4)
    zero.add(torch.stack([torch.zeros(8, 4), torch.ones(8, 4)]), "s")
    assert calibrate.choose(zero, "head", "amax", 1.0) == pytest.approx([1 / 448, 1 / 448]), (
        "a head of zeros gets the scale of the others"
    )
    for options, message in (
        (("channel", "amax"), "per tensor or per head"),
        (("head", "median"), "rule is one of"),
        (("head", "amax", 0.5), "headroom"),
        (("head", "percentile", 1.0, 20.0), "percentile"),
    ):
        with pytest.raises(Invalid, match=message):
            calibrate.choose(seen, *options)


def test_an_artifact_records_where_it_comes_from(loaded: LoadedModel, tmp_path: Path) -> None:
    observer = calibrate.observe(loaded, samples())
    made = calibrate.export(loaded, observer, samples())
    assert (made.model, made.revision, made.rule, made.calibrated_position) == ("tiny", "b" * 40, "amax", 63)
    assert (
        made.calibration == f"texts:{texts.digest(samples())}"
        and made.report["mix"] == "chat 1, code 2"
        and made.report["tokens"] == 192
    )
    assert not made.uncalibrated and set(made.scales) == {(layer, part) for layer in (0, 1) for part in "kv"}
    assert made == calibrate.export(loaded, calibrate.observe(loaded, samples()), samples()), (
        "the same data makes the same artifact"
    )
    assert made != calibrate.export(loaded, calibrate.observe(loaded, samples(2)), samples(2))
    made.save(tmp_path / "a")
    assert artifact.load(tmp_path / "a") == made
    result = compare.compare(loaded, [text(64, 9)], [from_artifact(made)])[0]
    assert result.clipped == 0 and result.over(result.kl).mean < 0.1  # type: ignore[union-attr]
    half = calibrate.export(loaded, observer, samples(), excluded=[1], granularity="tensor")
    assert half.excluded == (1,) and set(half.scales) == {(0, "k"), (0, "v")}
    with pytest.raises(Invalid, match="excluded layer 7"):
        calibrate.export(loaded, observer, samples(), excluded=[7])


def test_kvb_04_a_layer_that_saw_nothing_is_not_exported(loaded: LoadedModel) -> None:
    """The model has two layers; its configuration speaks of three, so the third's cache is never called."""
    longer = transformers.LlamaConfig(**{**loaded.model.config.to_dict(), "num_hidden_layers": 3})
    caches = replace(loaded.caches, layers=(*loaded.caches.layers, LayerCache(2, "attention", 2, (WIDTH, WIDTH))))
    short = make()
    short.model.config.num_hidden_layers = longer.num_hidden_layers
    gap = replace(short, caches=caches)
    observer = calibrate.observe(gap, samples())
    with pytest.raises(Invalid, match="nothing is exported: k of layer 2 saw nothing; v of layer 2 saw nothing"):
        calibrate.export(gap, observer, samples())
    assert calibrate.export(gap, observer, samples(), excluded=[2]).excluded == (2,)


def test_values_that_are_not_finite_or_all_zero_are_not_exported(loaded: LoadedModel) -> None:
    observer = calibrate.observe(loaded, samples())
    observer.seen[1, "v"].add(torch.tensor([float("nan"), float("inf")])[:, None, None].expand(2, 1, WIDTH), "chat")
    with pytest.raises(Invalid, match="v of layer 1 saw 32 values that are not finite"):
        calibrate.export(loaded, observer, samples())
    zero = observe.Observer(loaded.caches.kv_layers())
    for seen in zero.seen.values():
        seen.add(torch.zeros(2, 4, WIDTH), "chat")
    with pytest.raises(Invalid, match="k of layer 0 saw only zeros"):
        calibrate.refuse_gaps(zero)


def test_the_layer_that_costs_most_is_proposed_with_its_price() -> None:
    deep = make(6)
    made = calibrate.export(deep, calibrate.observe(deep, samples()), samples())
    spoilt = {key: np.array(values) for key, values in made.scales.items()}
    spoilt[3, "k"] = np.full(2, 1e-5, np.float32)  # everything clips
    costs = calibrate.sensitivity(deep, replace(made, scales=spoilt), text(48, 7))
    proposed = calibrate.propose(costs, deep.caches)
    assert set(costs) == set(range(6)) and max(costs, key=costs.__getitem__) == 3
    assert proposed[0] == (3, costs[3], 2 * (16 + 16)), "two bytes instead of one for K and V of two heads"
    assert calibrate.propose(dict.fromkeys(range(6), 0.001), deep.caches) == [] == calibrate.propose({}, deep.caches)
    assert calibrate.sensitivity_report(costs).keys() == {f"sensitivity.{layer}" for layer in range(6)}


def test_scale_one_says_so(loaded: LoadedModel) -> None:
    made = uncalibrated(loaded.caches, "tiny", "b" * 40, "head", [0])
    assert (
        made.uncalibrated
        and made.rule == "uncalibrated"
        and made.calibrated_position is None
        and set(made.scales) == {(1, "k"), (1, "v")}
    )
    assert from_artifact(made).uncalibrated and not Scheme("s", "token-head", "token-head").uncalibrated


# --- comparison


def test_the_same_thing_twice_is_no_difference(loaded: LoadedModel) -> None:
    (result,) = compare.compare(
        loaded, [text(300, 1), text(300, 2)], [Scheme("s", "token-head", "token-head", {}, frozenset((0, 1)))]
    )
    assert result.over(result.kl).mean == pytest.approx(0, abs=1e-6) and result.over(result.top1).mean == 1  # type: ignore[union-attr]
    assert result.perplexity == pytest.approx(result.native_perplexity)
    plain = loaded.logits(torch.tensor(text(300, 1)[:-1]), loaded.empty_cache())
    nll = torch.nn.functional.cross_entropy(plain, torch.tensor(text(300, 1)[1:]), reduction="none")
    assert result.native_nll[0] == pytest.approx(nll.numpy(), abs=1e-4)


def test_worse_scales_are_worse(loaded: LoadedModel) -> None:
    made = calibrate.export(loaded, calibrate.observe(loaded, samples()), samples())
    good = from_artifact(made, "good")
    bad = Scheme("bad", "head", "head", {key: values / 200 for key, values in good.scales.items()})
    floor = Scheme("bf16", "bf16", "bf16")
    floor_, good_, bad_ = compare.compare(loaded, [text(128, i) for i in (1, 2)], [floor, good, bad])
    assert 0 < floor_.over(floor_.kl).mean < good_.over(good_.kl).mean < bad_.over(bad_.kl).mean  # type: ignore[union-attr]
    assert good_.clipped == 0 < bad_.clipped


def test_intervals_are_over_sequences() -> None:
    assert compare.interval([]) is None
    assert str(compare.interval([0.5])) == "0.5000"
    two = compare.interval([1.0, 3.0])
    assert two is not None and two.half == pytest.approx(12.706 * np.sqrt(2) / np.sqrt(2)) and two.sequences == 2
    many = compare.interval([0.0, 1.0] * 20)
    assert many is not None and many.half == pytest.approx(2.0 * np.std([0, 1] * 20, ddof=1) / np.sqrt(40))
    result = compare.Result(Scheme("s", "token-head", "token-head"))
    result.kl = [np.r_[np.zeros(512), np.ones(100)].astype(np.float32), np.zeros(300, np.float32)]
    assert result.buckets() == [(0, 512), (512, 612)]
    late = result.over(result.kl, 512, 612)
    assert late is not None and (late.mean, late.half, late.sequences) == (1.0, None, 1), (
        "one sequence reaches there: no interval"
    )


def test_continuations_are_scored_after_the_context_alone(loaded: LoadedModel) -> None:
    context, queries = text(50), [(text(4, 1), text(3, 2)), (text(2, 3), text(5, 4))]
    scheme = Scheme("s", "token-head", "token-head")
    for plan in (None, scheme):
        scored = retrieval.score(loaded, context, queries, [plan])[0]
        for (cue, answer), found in zip(queries, scored, strict=True):
            cache = Quantizer(plan).attach(loaded.empty_cache(), [0, 1])
            logits = loaded.logits(torch.tensor([*context, *cue, *answer]), cache).float()
            wanted = torch.nn.functional.cross_entropy(logits[-len(answer) - 1 : -1], torch.tensor(answer))
            assert found.nll == pytest.approx(float(wanted), abs=1e-3)
            assert not found.exact or found.correct == 1


def test_retrieval_contexts_hide_what_they_ask_for(loaded: LoadedModel) -> None:
    words = [loaded.encode(f" {word}") for word in ("river", "stone", "market", "garden", "silver", "winter")]
    context, queries = retrieval.copies(loaded.encode("\n\n"), text(600), words, 500, 4, 0)
    assert len(context) == 500 and len(queries) == 4
    for cue, answer in queries:
        whole = [*cue, *answer]
        assert any(context[i : i + len(whole)] == whole for i in range(len(context)))
    context, queries = retrieval.needles(loaded.encode, text(900), 800, 5, 0)
    assert len(context) == 800 and len({bytes(cue) for cue, _ in queries}) == 5
    for _, answer in queries:
        assert loaded.decode(answer).strip() in loaded.decode(context)
    with pytest.raises(Invalid, match="too few"):
        retrieval.copies([10], text(600), words, 100, 4, 0)
    found = retrieval.measure(loaded, "copy", [(context, queries)], [None, Scheme("s", "token-head", "token-head")])
    assert [one.scheme for one in found] == ["native", "s"] and found[0].nll.mean == pytest.approx(
        found[1].nll.mean, rel=0.2
    )


def test_answers_depend_on_seed_and_scheme_alone(loaded: LoadedModel) -> None:
    prompt = text(20)
    greedy = tasks.generate(loaded, prompt, None, 12)
    assert greedy == tasks.generate(loaded, prompt, None, 12) and len(greedy) == 12
    drawn = [tasks.generate(loaded, prompt, None, 12, 1.0, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    cache = loaded.empty_cache()
    logits = loaded.logits(torch.tensor(prompt), cache)[-1]
    assert greedy[0] == int(logits.argmax())
    ends = replace(loaded, end=frozenset((greedy[3],)))
    assert tasks.generate(ends, prompt, None, 12) == greedy[: greedy.index(greedy[3])]


# --- the twin


def test_the_twin_is_the_same_function_and_is_undone(loaded: LoadedModel) -> None:
    own = make()
    before = {name: weight.clone() for name, weight in own.model.state_dict().items()}
    plain = own.logits(torch.tensor(text(64)), own.empty_cache())
    cache = own.empty_cache()
    with outlier_twin.outliers(own, 512):
        twins = own.logits(torch.tensor(text(64)), cache)
    assert torch.allclose(plain, twins, atol=1e-3, rtol=1e-3)
    native = filled(own, None, text(64))
    for name in ("keys", "values"):
        ratio = getattr(cache.layers[0], name).abs().amax() / getattr(native.layers[0], name).abs().amax()
        assert 100 < ratio <= 512
    assert all(torch.equal(weight, before[name]) for name, weight in own.model.state_dict().items())
    for factor in (0, 3, 100):
        with pytest.raises(Invalid, match="power of two"), outlier_twin.outliers(own, factor):
            pass


# --- data


def test_texts_of_strata(tmp_path: Path) -> None:
    encode = lambda line: list(line.encode())  # noqa: E731
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "b.jsonl").write_text('{"text": "hello there"}\n\n{"tokens": [1, 2, 3], "stratum": "ids"}\n')
    (tmp_path / "c.tokens").write_text("1, 2 3\n4")
    found = texts.read(
        [f"long={tmp_path}/a.txt", f"chat={tmp_path}/b.jsonl", f"raw={tmp_path}/c.tokens"], encode, 30, 2
    )
    assert [(one.stratum, len(one.tokens)) for one in found] == [
        ("long", 30),
        ("long", 30),
        ("chat", 11),
        ("ids", 3),
        ("raw", 4),
    ]
    assert texts.mix(found) == "chat 1, ids 1, long 2, raw 1"
    assert texts.digest(found) != texts.digest(found[::-1]) and texts.digest(found) == texts.digest(list(found))
    built_in = [texts.read([], encode, 200, 3, evaluation=which) for which in (False, True)]
    assert all(len(part) == 3 for part in built_in) and not set(built_in[0]) & set(built_in[1])
    for name, content, message in (
        ("d.jsonl", "{", "line 1: not JSON"),
        ("e.jsonl", '{"text": "a", "tokens": [1]}', "line 1: write"),
        ("f.tokens", "1 x", "token ids are numbers"),
        ("g.jsonl", '{"tokens": [-1]}', "token id"),
        ("h.txt", "", "no piece of 2 tokens"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(Invalid, match=message):
            texts.read([f"s={tmp_path / name}"], encode, 30, 2)
    with pytest.raises(Invalid, match="stratum=FILE"):
        texts.read(["nothing"], encode, 30, 2)
