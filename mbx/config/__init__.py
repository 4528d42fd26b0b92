"""From names, files, flags and keywords to the settings of a run."""
