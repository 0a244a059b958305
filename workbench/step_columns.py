"""The columns of metrics.csv that learning rates and auxiliary terms of an update fill."""

from __future__ import annotations

from workbench.core.train import StepResult


def rates_of(result: StepResult) -> dict[str, float | None]:
    """The learning rates of a step: AdamW's, and Muon's where it trains; of expert and shared
    matrices the rate of AdamW, where that trains them."""
    rates = result.rates
    return {
        "lr": result.learning_rate,
        "shared_lr": rates.get("adamw/shared"),
        "expert_lr": rates.get("adamw/expert"),
        "muon_lr": next((rate for name, rate in rates.items() if name.startswith("muon/")), None),
    }


def terms_of(result: StepResult) -> dict[str, float | None]:
    """The auxiliary terms of a step: what each adds to the objective, its value, its weight."""
    terms: dict[str, float | None] = {}
    if one := result.balance:
        terms |= {"train/balance": one.contribution}
        terms |= {"router_aux_loss": one.value, "router_aux_weight": one.weight}
    if one := result.diversity:
        terms |= {"train/diversity": one.contribution}
        terms |= {"expert_diversity_loss": one.value, "expert_diversity_lambda": one.weight}
    return terms
