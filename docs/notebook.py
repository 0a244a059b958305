# %% [markdown]
# # Runs and comparisons in a notebook
#
# The marks between cells are those of VS Code, Spyder and Jupyter (with jupytext). The cells read
# four runs of the store, which these commands make (a minute and a half each on two cores):
#
#     dense='model.mlp_type=dense model.shared_intermediate_size=null model.intermediate_size=512'
#     wb run experiments/quickstart.yaml
#     wb run experiments/quickstart.yaml name=quickstart_dense $dense
#     wb run experiments/quickstart.yaml seed=43
#     wb run experiments/quickstart.yaml seed=43 name=quickstart_dense-s43 $dense

# %%
import matplotlib.pyplot as plt

from workbench import UserError, compare_arms, compare_runs, load_run, load_runs, to_frame

load_runs("quickstart*")  # the newest first; the last value of a cell shows itself as a table

# %% [markdown]
# One run: what ran, what it cost, what came of it. `record` holds all of it; `final` the last value
# of every number, in nats per token where it is an NLL.

# %%
run = load_run("quickstart")
run

# %%
held_out = run.final["held_out/nll"]
f"{run.name}, seed {run.seed}: held_out/nll {held_out:.4f}"

# %% [markdown]
# Two runs. The verdict is that of `wb compare quickstart quickstart_dense --treatment model`.

# %%
comparison = compare_runs("quickstart", "quickstart_dense", treatment=["model"])
comparison

# %%
# Refused claims are blank; low and high are the 95 % interval over documents.
numbers = to_frame(comparison)
numbers.loc[numbers.claim == "nll", ["a", "b", "difference", "low", "high", "unit"]]

# %%
figure, axes = plt.subplots()
for one in (run, load_run("quickstart_dense")):
    tokens, nll = zip(*one.curve("held_out/nll"), strict=True)
    axes.plot(tokens, nll, marker="o", label=one.name)
axes.set(xlabel="tokens", ylabel="held_out/nll (nats/token)")
axes.legend()

# %% [markdown]
# Another seed as well as another model: there are no numbers to be looked at, but the reason why.

# %%
refused = compare_runs("quickstart", "quickstart_dense-s43", treatment=["model"])
refused

# %%
assert refused.verdict == "refused"
assert refused.results is None
[rule.rule for rule in refused.judgement.rules if rule.effects["nll"] == "refuse"]

# %% [markdown]
# Two seeds an arm. They are paired, and the interval is over seeds: this one may name a winner.

# %%
arms = compare_arms(
    {
        "routed": ["quickstart", "quickstart-s43"],
        "dense": ["quickstart_dense", "quickstart_dense-s43"],
    },
    treatment=["model"],
)
arms

# %%
decided = to_frame(arms)
decided[decided.decides]

# %% [markdown]
# A mistake is a `UserError` that says what is allowed.

# %%
try:
    compare_runs("quickstart", "quickstart_dense", treatment=["modle"])
except UserError as error:
    print(error)
