"""Pictures as SVG, made by pure functions; they have classes and no styles, as the security policy of pages wants."""
