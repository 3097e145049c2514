"""From noise to text: a time grid, a step rule, and transforms of the belief, as a generator of frames."""
