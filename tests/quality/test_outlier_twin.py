"""The twin computes the same function, and is undone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


from kvtier.errors import Invalid  # noqa: E402
from kvtier.quality import outlier_twin  # noqa: E402
from kvtier.quality.loaded_model import LoadedModel  # noqa: E402
from tests.quality.small_model import filled, make, text  # noqa: E402


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
