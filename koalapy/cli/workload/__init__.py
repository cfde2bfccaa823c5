"""Commands that generate, run and measure workloads."""

from koalapy.cli.terminal.arguments import Group, Lazy

workload_group = Group(
    "Generate and run workloads, and report results.",
    {
        "generate": Lazy("koalapy.cli.workload.generate:generate_workload"),
        "run": Lazy("koalapy.cli.workload.run:run_workload"),
        "report": Lazy("koalapy.cli.workload.report:show_report"),
    },
)
