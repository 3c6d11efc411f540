from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared-cores", deadline=None)  # a busy machine must not fail a test
settings.load_profile("shared-cores")
