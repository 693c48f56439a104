"""In the style of word2vec scripts: a corpus in the working folder, vectors as text at the end.

It catches SIGTERM, and has no way to resume.
"""

import collections
import random
import signal
import sys

signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted: nothing to save"))
random.seed(3)
with open("corpus.txt", "w") as file:
    for _ in range(400):
        file.write(" ".join(random.choice("king queen man woman cat dog".split()) for _ in range(12)) + "\n")
vectors = collections.defaultdict(lambda: [random.gauss(0, 0.1) for _ in range(8)])
for epoch in range(150):
    with open("corpus.txt") as file:
        for line in file:
            words = line.split()
            for one, two in zip(words, words[1:]):
                a, b = vectors[one], vectors[two]
                for number in range(8):
                    a[number], b[number] = 0.99 * a[number] + 0.01 * b[number], 0.99 * b[number]
    print(f"EPOCH {epoch}: training on 4800 raw words took 0.0s, alpha 0.025", flush=True)
with open("vectors.txt.part", "w") as file:
    file.write(f"{len(vectors)} 8\n")
    for word, vector in sorted(vectors.items()):
        file.write(f"{word} {' '.join(f'{value:.6f}' for value in vector)}\n")
__import__("os").rename("vectors.txt.part", "vectors.txt")
