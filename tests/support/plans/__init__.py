"""Plans, layouts and costs made by hand."""
