"""Plan GPT-13B on eight nodes of eight H100, without any of them: the plan, its memory, and what less memory costs.

    python examples/plan_cluster.py

Less than a minute on two CPU cores.  Every line is a prediction from datasheets; `jhpt profile` measures real layers.
"""

import jhpt

CLUSTER = "h100x8x8"


def main() -> None:
    """Plans for three memory budgets, and shows a refusal."""
    for budget in ("80GB", "16GB", "8GB"):
        plan = jhpt.plan("gpt-13b", cluster=CLUSTER, batch=256, budget=budget)
        degrees = sorted({run.tensor for stage in plan.stages for chunk in stage.chunks for run in chunk.runs})
        print(
            f"{budget:>5} a device: {len(plan.stages)} stage(s) x {plan.stages[0].devices} devices, tensor {degrees}, "
            f"{plan.micro_batches} micro-batches, ZeRO-{plan.zero}, recomputation {'on' if plan.recompute else 'off'}: "
            f"{plan.seconds:.3f} s a step, {plan.tokens_per_second:,.0f} tokens/s, MFU {100 * plan.mfu:.0f} %"
        )
    try:
        jhpt.plan("gpt-13b", cluster="h100x2x1", batch=256)
    except jhpt.InputError as refusal:
        print(f"\non two devices: {refusal}")
    plan.save("plan.json")
    print(f"\nthe last plan is in plan.json:\n\n{plan}")


if __name__ == "__main__":
    main()
