"""Spoken text: conversion of a model's written text to what a voice should read."""
