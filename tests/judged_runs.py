"""The runs whose tasks were executed: the verdict's curve (models/verdict.py) is made from them."""

import math
from collections.abc import Sequence

Run = tuple[float, float, str]
# (KL on answers, nats a token; share kept of the tasks that the SiLU model solves; the run), all of
# Qwen2.5-Coder-Instruct, greedy. A share's standard error is some 0.03.
RUNS = (
    (0.019, 0.89, "0.5B, fitted, 20M tokens"),
    (0.0185, 0.936, "0.5B, fitted with steps, 22 %"),
    (0.0192, 0.93, "0.5B, fitted, 8M tokens at a tenth of the rate"),
    (0.0205, 0.876, "0.5B, fitted, 8M tokens at a quarter, sure ones first"),
    (0.0213, 0.899, "0.5B, fitted, 8M tokens at a quarter"),
    (0.0231, 0.941, "1.5B, fitted, 12M tokens"),
    (0.0245, 0.939, "1.5B, fitted with steps, 14.5 %"),
    (0.0252, 0.954, "1.5B, fitted with steps, 14.4 %"),
    (0.0249, 0.919, "0.5B, fitted on 3M tokens, 22 %"),
    (0.0265, 0.883, "0.5B, fitted with steps, 14 %"),
    (0.0289, 0.875, "0.5B, fitted with steps, 15 %"),
    (0.0289, 0.882, "0.5B, fitted with slower steps, 15 %"),
    (0.0293, 0.936, "1.5B, fitted with steps, 15 %"),
    (0.0295, 0.926, "0.5B, fitted on 1M tokens, 22 %"),
    (0.0352, 0.829, "0.5B, fitted, 8M tokens at 0.7 of the rate"),
    (0.037, 0.908, "1.5B, fitted with steps, 12 %"),
    (0.0382, 0.794, "0.5B, fitted with steps, 10 %"),
    (0.0453, 0.913, "1.5B, fitted on 0.9M tokens, 18 %"),
    (0.0558, 0.764, "0.5B, fitted, 15 %"),
    (0.0888, 0.742, "1.5B, fitted with steps, 4.7 %"),
    (0.095, 0.73, "1.5B, fitted with steps, 5 %"),
    (0.033, 0.80, "0.5B, fitted, 20M tokens, priced"),
    (0.038, 0.85, "0.5B, fitted on 650,000 tokens"),
    (0.047, 0.76, "0.5B, fitted, 17M tokens, half of them source"),
    (0.053, 0.87, "1.5B, fitted, full rank"),
    (0.063, 0.87, "1.5B, fitted, half rank"),
    (0.075, 0.65, "0.5B, SiLU that hardens, 17M tokens"),
    (0.085, 0.81, "0.5B, fitted on 100,000 tokens"),
    (0.102, 0.79, "1.5B, fitted, half rank, gates shifted"),
    (0.153, 0.63, "0.5B, fitted, quarter rank"),
    (0.288, 0.52, "0.5B, fitted, gates shifted to 10 %"),
    (0.637, 0.28, "0.5B, fitted, gates shifted to 5 %"),
    # by `eval`, on 64 answers
    (0.0126, 0.913, "0.5B, fitted, 29M tokens, 15 %"),
    (0.0155, 0.910, "1.5B, fitted half on plain text, 20M tokens, 15 %"),
    (0.0155, 0.929, "1.5B, fitted half on plain text, 17 %"),
    (0.0156, 0.919, "1.5B, fitted on 1.2M tokens, 14.3 %"),
    (0.0166, 0.936, "1.5B, fitted on 4M tokens, half of them plain, slow steps"),
    (0.0175, 0.921, "1.5B, fitted on 4M tokens, half of them plain"),
    (0.0177, 0.921, "1.5B, fitted half on plain text, thresholds by cost"),
    (0.0177, 0.916, "1.5B, fitted half on plain text"),
    (0.0179, 0.913, "1.5B, fitted half on plain text, 17M tokens, 15 %"),
    (0.0195, 0.909, "0.5B, fitted, 15 %, steps of 8192 tokens"),
    (0.0197, 0.879, "0.5B, fitted, 15 %, steps of 4096 tokens"),
    (0.0197, 0.886, "0.5B, fitted, 15 %, faster sums"),
    (0.0216, 0.819, "0.5B, fitted half on plain text, 14.4 %"),
    (0.0392, 0.760, "1.5B, fitted, 4.75 %, 1600 steps"),
    (0.0431, 0.731, "1.5B, fitted half on plain text, 16M tokens, 5 %"),
)


def curve(runs: Sequence[Run]) -> tuple[float, float]:
    """(a, b) of kept = exp(-exp(a) KL^b), by least squares over log KL and log -log kept."""
    x = [math.log(kl) for kl, *_ in runs]
    y = [math.log(-math.log(kept)) for _, kept, *_ in runs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    pairs = [(at - mean_x, value - mean_y) for at, value in zip(x, y, strict=True)]
    b = sum(at * value for at, value in pairs) / sum(at * at for at, _ in pairs)
    return mean_y - b * mean_x, b
