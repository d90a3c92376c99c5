"""Pictures and traces: stage graphs, timelines, SVG, Perfetto."""
