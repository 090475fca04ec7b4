"""Speed is claimed only from here, as ratios against a named peer measured in the same run."""
