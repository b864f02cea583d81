// A decoder of a few small layers with random weights, through the library's C interface.
#pragma once

#include <cstdint>
#include <vector>

#include "device.h"
#include "model.h"

struct Shape {
  int head_dim;
  int num_kv_heads;
  int group;
  int kv_element_bytes;
  int weight_format;  // of the file
  int num_threads;
};

class ToyModel {
 public:
  ToyModel(naru::Device* device, const Shape& shape, uint32_t seed);
  ~ToyModel();
  ToyModel(const ToyModel&) = delete;
  ToyModel& operator=(const ToyModel&) = delete;

  // Runs `count` tokens at the end of a sequence of `length`, as a prompt or generated; logits of the last one.
  std::vector<float> step(int count, int length, bool generated);

  naru::Model* native() { return model_; }
  static constexpr int kVocab = 80, kBlock = 16, kMaxLength = 1024;

 private:
  int matrix(int rows, int columns, int format);

  Shape shape_;
  uint32_t seed_;
  naru::Model* model_;
};
