"""In the style of Stable-Baselines3: `logs/rl_model_1000_steps.zip`; the newest one is loaded."""

import glob
import os
import random
import re
import zipfile

TOTAL = 30_000
policy, steps = [0.5, 0.5], 0
found = sorted(
    glob.glob("logs/rl_model_*_steps.zip"), key=lambda name: int(re.search(r"(\d+)_steps", name)[1])
)
if found:
    with zipfile.ZipFile(found[-1]) as archive:
        policy = [float(word) for word in archive.read("policy.pth").split()]
    steps = int(re.search(r"(\d+)_steps", found[-1])[1])
    print(f"Loading {found[-1]}: {steps} timesteps")
os.makedirs("logs", exist_ok=True)
while steps < TOTAL:
    rewards = 0.0
    for _ in range(3000):
        arm = 0 if random.random() < policy[0] else 1
        reward = sum(random.random() < 0.3 + 0.4 * arm for _ in range(40)) / 40
        policy[arm] = max(0.01, policy[arm] + 0.001 * (reward - 0.5))
        total = sum(policy)
        policy = [each / total for each in policy]
        rewards += reward
    steps += 1000
    print("-" * 30 + f"\n| ep_rew_mean     | {rewards / 1000:.3f}\n| total_timesteps | {steps}", flush=True)
    with zipfile.ZipFile(f"logs/rl_model_{steps}_steps.zip", "w") as archive:
        archive.writestr("policy.pth", " ".join(map(repr, policy)))
os.replace(f"logs/rl_model_{TOTAL}_steps.zip", "ppo_bandit.zip")
