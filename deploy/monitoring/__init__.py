"""What watches a daemon from outside: rules for Prometheus, and a board for Grafana."""
