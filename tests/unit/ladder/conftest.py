from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for ladder_cases, under any import mode

settings.register_profile("shared-cores", deadline=None)  # a busy machine must not fail a test
settings.load_profile("shared-cores")
