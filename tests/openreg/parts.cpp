// What a device needs to train sharded and OpenReg leaves to others: collectives, and storages that
// change size. A real device brings both with its extension of torch.

#include <torch/extension.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

namespace {

using c10d::Work;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;

// The result is written by `wait`, and not before: who reads it earlier reads what was there.
class StagedWork : public Work {
 public:
  StagedWork(c10::intrusive_ptr<Work> inner, Copies results)
      : inner_(std::move(inner)), results_(std::move(results)) {}

  bool isCompleted() override { return inner_->isCompleted(); }

  bool wait(std::chrono::milliseconds timeout) override {
    inner_->wait(timeout);
    // As a backend's kernels write: no graph, no new version.
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [device, host] : std::exchange(results_, {})) device.copy_(host);
    return true;
  }

 private:
  c10::intrusive_ptr<Work> inner_;
  Copies results_;
};

// Collectives of tensors on a device, run by a backend of the CPU on copies in host memory.
class StagedBackend : public c10d::Backend {
 public:
  explicit StagedBackend(BackendPtr inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "staged"; }

  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors,
                                     const c10d::BroadcastOptions& options) override {
    auto host = to_host(tensors);
    return staged(inner_->broadcast(host, options), tensors, host);
  }

  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors,
                                     const c10d::AllreduceOptions& options) override {
    auto host = to_host(tensors);
    return staged(inner_->allreduce(host, options), tensors, host);
  }

  c10::intrusive_ptr<Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                     std::vector<at::Tensor>& inputs,
                                     const c10d::AllgatherOptions& options) override {
    auto from = to_host(inputs);
    std::vector<std::vector<at::Tensor>> into{like_on_host(outputs[0])};
    return staged(inner_->allgather(into, from, options), outputs[0], into[0]);
  }

  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    auto from = input.cpu();
    auto into = like_on_host({output});
    return staged(inner_->_allgather_base(into[0], from, options), {output}, into);
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto from = input.cpu();
    auto into = like_on_host({output});
    return staged(inner_->_reduce_scatter_base(into[0], from, options), {output}, into);
  }

  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& options) override {
    auto from = input.cpu();
    auto into = like_on_host({output});
    auto work = inner_->alltoall_base(into[0], from, output_splits, input_splits, options);
    return staged(work, {output}, into);
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    return inner_->barrier(options);
  }

  void abort() override { inner_->abort(); }

 private:
  static std::vector<at::Tensor> to_host(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> copies;
    for (const auto& tensor : tensors) copies.push_back(tensor.cpu());
    return copies;
  }

  static std::vector<at::Tensor> like_on_host(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> made;
    for (const auto& tensor : tensors)
      made.push_back(at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
    return made;
  }

  static c10::intrusive_ptr<Work> staged(c10::intrusive_ptr<Work> work,
                                         const std::vector<at::Tensor>& device,
                                         const std::vector<at::Tensor>& host) {
    Copies results;
    for (size_t i = 0; i < device.size(); ++i) results.emplace_back(device[i], host[i]);
    return c10::make_intrusive<StagedWork>(std::move(work), std::move(results));
  }

  BackendPtr inner_;
};

// Keeps the bytes that fit, as torch's own devices do.
void resize(const at::Storage& storage, int64_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::DeviceGuard guard(storage.device());
  auto fresh = impl->allocator()->allocate(nbytes);
  const auto kept = std::min<size_t>(nbytes, impl->nbytes());
  if (kept) impl->allocator()->copy_data(fresh.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(nbytes);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("staged_backend", [](BackendPtr inner) -> BackendPtr {
    return c10::make_intrusive<StagedBackend>(std::move(inner));
  });
  m.def("resize", &resize);
}
