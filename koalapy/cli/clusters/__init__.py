"""Commands that show clusters and the grid."""
