"""Where else the figures of a run can go (`--report-to`), and what each needs. Imports none."""

import importlib.util

from twellctl.errors import UsageError

# its name for the Trainer: what pip installs, and the modules of which one must be there
TRACKERS = {
    "azure_ml": ("azureml-mlflow", "azureml"),
    "clearml": ("clearml", "clearml"),
    "codecarbon": ("codecarbon", "codecarbon"),
    "comet_ml": ("comet-ml", "comet_ml"),
    "dagshub": ("dagshub", "dagshub"),
    "dvclive": ("dvclive", "dvclive"),
    "flyte": ("flytekit", "flytekit"),
    "mlflow": ("mlflow", "mlflow"),
    "neptune": ("neptune", "neptune"),
    "swanlab": ("swanlab", "swanlab"),
    "tensorboard": ("tensorboard", "tensorboard", "tensorboardX"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb"),
}


def check_report_to(name: str) -> None:
    """`UsageError` for a tracker that nobody knows, or that is not installed."""
    if name in ("none", "all"):
        return
    if name not in TRACKERS:
        raise UsageError(
            f"report-to {name!r} is unknown: take one of {', '.join(TRACKERS)}, all or none"
        )
    package, *modules = TRACKERS[name]
    if not any(importlib.util.find_spec(module) for module in modules):
        raise UsageError(f"report-to {name}: {package} is not installed: pip install {package}")
