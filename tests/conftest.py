"""What every test may use. Hypothesis runs without per-example deadlines (machines differ) and prints what reproduces a failure.

Tests marked `torch` begin with `torch = pytest.importorskip("torch")` and `pytestmark = pytest.mark.torch`: without torch they are skipped
aloud, and `make test-torch` runs them where it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # tests import bench and each other's helpers from the root
    sys.path.insert(0, str(ROOT))

settings.register_profile("kvtier", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtier")
