"""How the properties are searched: anew in every run, but with the same examples each time where CI decides by them."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("MEGATRON_RL_CI"):
    settings.load_profile("ci")
