"""Commands that generate, run and measure workloads."""

from koalapy.cli.terminal.arguments import Group

workload_group = Group(
    "Generate and run workloads, and report results.",
    {
        "generate": "koalapy.cli.workload.generate:generate_workload",
        "run": "koalapy.cli.workload.run:run_workload",
        "report": "koalapy.cli.workload.report:show_report",
    },
)
