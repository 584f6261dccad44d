"""Ordinary sentences for benchmark prompts: routing and draft acceptance depend on text being text."""

from __future__ import annotations

_TEXT = """
The harbour master wrote down the names of all ships that left before the storm reached the outer wall.
A good proof is short enough to be remembered and long enough to be checked by someone who doubts it.
In the third year of the drought the village dug a second well, forty metres east of the first.
When two caches disagree, the older entry wins unless its version number has been revoked meanwhile.
She repaired clocks in a shop so narrow that customers had to walk out backwards.
The function returns the first index at which both lists differ, or the length of the shorter one.
Rivers in the north freeze from the banks inward, which is why the ferries keep to the middle.
Nobody could say who had planted the pear trees, only that they were older than the road.
The committee postponed its vote because the translation of the second paragraph was disputed.
Copper expands by about seventeen millionths of its length for every degree of warming.
After the concert the violinist found a letter in her case, folded twice and without a name.
A compiler that never warns teaches its users to expect nothing and to test everything.
The archive burned for two days, and the smoke carried half-legible pages across the valley.
Most of the island's birds nest on the ground, since no mammal ever reached it by itself.
He kept the receipts in a tin box, sorted by colour of the paper rather than by date.
To divide fairly, let one cut and the other choose, and repeat until both are tired of it.
The train stopped in open country, and for a while one could hear only crickets and a radio.
Every measurement in the table was repeated five times, and the middle value is the one printed.
In spring the baker's window fills with bread shaped like hares, larks and sleeping cats.
The old law forbade the sale of salt after sunset, for reasons that the law itself had forgotten.
A queue with a limit fails early and politely; a queue without one fails late and all at once.
The cartographer left the far coast blank and wrote there that she had not been.
Glass is neither slow liquid nor quick stone, though schoolbooks have called it both.
They painted the lighthouse in stripes so that it could be told from the church at dusk.
The patient slept, woke, asked for water, and corrected the grammar of the nurse's note.
Between the two summits runs a ridge so even that shepherds call it the table.
If the key is missing from the map, the default is computed once and stored under it.
The orchestra tuned to a bell that was known to be flat, out of courtesy to the bell.
Winter wheat is sown in autumn and waits under the snow with the patience of a seed.
A letter sent by sea took four months; a rumour on the same ship arrived a day before it.
The museum labels its forgeries with more care than its originals, because they are asked about more.
On the last page of the ledger someone had added a column of sums that were all correct and all pointless.
"""


def sentences() -> tuple[str, ...]:
    """The sentences, each with a space before it, so that they can stand in any order."""
    return tuple(f" {line}" for line in _TEXT.strip().splitlines())
