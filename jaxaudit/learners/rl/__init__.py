"""Reinforcement learning on environments: PPO, TRPO, SAC and TD3."""
