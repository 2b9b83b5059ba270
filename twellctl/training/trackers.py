"""Where else the figures of a run can go (`--report-to`), and what each needs. Imports none."""

import importlib.util

from twellctl.errors import UsageError

# the Trainer's names; the module to find is called so, and the package, but for those of _OTHERS
TRACKERS = (
    "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "mlflow",
    "neptune", "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip
_OTHERS = {"azure_ml": ("azureml", "azureml-mlflow"), "flyte": ("flytekit", "flytekit")}


def check_report_to(name: str) -> None:
    """`UsageError` for a tracker that nobody knows, or that is not installed."""
    if name in ("none", "all"):
        return
    if name not in TRACKERS:
        raise UsageError(
            f"report-to {name!r} is unknown: take one of {', '.join(TRACKERS)}, all or none"
        )
    module, package = _OTHERS.get(name, (name, name.replace("_", "-")))
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"report-to {name}: {package} is not installed: pip install {package}")
