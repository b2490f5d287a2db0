"""RULER (Hsieh et al., arXiv 2404.06654): its 13 tasks and their scores, and smaller tasks of our own beside it."""
