"""Model families in numbers: one module each, which registers its settings.

Every module of this folder is imported here, so a family is known to configurations, the planner and the console by
being in it.  Its functions, with jax, are the module of the same name in `jhpt.models`.  A family from elsewhere calls
`jhpt.core.families.family.register_family` and `jhpt.models.family.register_model`.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
