"""With this folder in PYTHONPATH torch says that this CPU has neither AVX-512 nor AMX, so vLLM takes its kernels for AVX2.

`make test-other-cpus` does that. torch's own kernels, oneDNN's and MKL's are chosen by variables (see there); vLLM has none.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Finder:
    """Finds `torch.cpu`, and hides capabilities in it once it is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "torch.cpu" else None  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_hide(module: ModuleType) -> None:
                load(module)
                every = module.get_capabilities
                module.get_capabilities = lambda: {  # type: ignore[attr-defined]
                    key: value for key, value in every().items() if not key.startswith(("avx512", "amx"))
                }

            spec.loader.exec_module = load_and_hide  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
