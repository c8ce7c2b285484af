"""Models of one layout: arithmetic, communication, memory, pipelines, and the step that they add up to."""
