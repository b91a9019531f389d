// Runs the file of a step in C++, with nothing of Python: its inputs from one file, its results into another.
//
//   g++ -std=c++20 run_step.cpp -o run_step -I.../torch/include -L.../torch/lib -Wl,-rpath,.../torch/lib
//       -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10
//   ./run_step step.pt2 inputs.pt results.pt
//
// inputs.pt is what torch.save(list_of_tensors) writes, in the order of "inputs" in the file's psg_fx.json; results.pt
// is read by torch.load, in the order of its "outputs".

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <c10/core/InferenceMode.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) {
    throw std::runtime_error("cannot write " + path);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run_step STEP.pt2 INPUTS.pt RESULTS.pt\n";
    return 2;
  }
  try {
    c10::InferenceMode guard;
    torch::inductor::AOTIModelPackageLoader step(argv[1]);
    const c10::IValue held = torch::jit::pickle_load(read(argv[2]));
    std::vector<at::Tensor> inputs;
    for (const c10::IValue& value : held.toListRef()) {
      inputs.push_back(value.toTensor());
    }
    std::vector<at::Tensor> results = step.run(inputs);
    const std::vector<c10::IValue> values(results.begin(), results.end());
    write(argv[3], torch::jit::pickle_save(c10::ivalue::Tuple::create(values)));
    std::cout << inputs.size() << " inputs, " << results.size() << " results\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
