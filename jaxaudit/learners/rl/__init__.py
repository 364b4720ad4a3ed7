"""Reinforcement learning on environments: PPO, TRPO, SAC, TD3."""
