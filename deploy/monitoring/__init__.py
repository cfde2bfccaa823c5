"""Rules for Prometheus and a board for Grafana."""
